#![no_main]
use tracekit_guidance_fuzz::{limit::watch, manifest};

libfuzzer_sys::fuzz_target!(|data: &[u8]| watch(data, manifest::run));
