#![no_main]
use tracekit_guidance_fuzz::{limit::watch, open};

libfuzzer_sys::fuzz_target!(|data: &[u8]| watch(data, open::run));
