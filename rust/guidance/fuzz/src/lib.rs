//! What the fuzz targets do with an input, without the fuzzer: `tests/fuzz.rs` of the store runs the same.
pub mod chunk;
pub mod index;
pub mod limit;
pub mod manifest;
pub mod open;
pub mod seeds;

#[global_allocator]
static COUNTING: limit::Counting = limit::Counting;
