#![no_main]
use tracekit_guidance_fuzz::{index, limit::watch};

libfuzzer_sys::fuzz_target!(|data: &[u8]| watch(data, index::run));
