//! The `.tkg` guidance format and store.
//!
//! A dataset is a folder of segments. A segment is a header, a schema, records (chunks of rows, commits of
//! trajectories), an index and a postscript; every byte is covered by a checksum. `docs/format.md` is the
//! specification.
#![deny(missing_docs)]

#[cfg(not(all(target_endian = "little", target_pointer_width = "64", unix)))]
compile_error!("the store is written for 64-bit little-endian Unix");

pub mod audit;
pub mod chunk;
pub mod coset;
pub mod crc;
pub mod dataset;
pub mod decode;
pub mod directory;
pub mod encode;
pub mod error;
pub mod folder;
mod huffman;
pub mod index;
pub mod layout;
pub mod manifest;
#[cfg(feature = "object-store")]
pub mod object;
pub mod pack;
pub mod plan;
pub mod recover;
pub mod request;
pub mod scan;
pub mod schema;
pub mod segment;
pub mod slots;
pub mod source;
pub mod traj;
pub mod verify;
pub mod writer;

pub use chunk::{Codes, SiteRows};
pub use dataset::Dataset;
pub use decode::Target;
pub use error::{Error, Result};
pub use request::Request;
pub use schema::{Encoding, GlobalScale, ScaleFormat, Schema, Site};
pub use traj::Status;
pub use writer::{Options, Sync, Writer};

pub use crc::crc32c;

/// CRC32C of token ids as little-endian int64: what a chunk keeps to recognise its tokens.
pub fn token_crc(ids: &[i64]) -> u32 {
    // SAFETY: any i64 is 8 initialised bytes, and the target is little-endian.
    let bytes = unsafe { std::slice::from_raw_parts(ids.as_ptr().cast::<u8>(), std::mem::size_of_val(ids)) };
    crc32c(bytes)
}
