#![no_main]
use tracekit_guidance_fuzz::{chunk, limit::watch};

libfuzzer_sys::fuzz_target!(|data: &[u8]| watch(data, chunk::run));
