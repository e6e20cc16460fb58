//! Datasets in object stores: `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder`.
//!
//! An object is written once. A dataset is published by uploading its segments and then, with a put that fails if the
//! number is taken, a manifest that lists them: a reader sees all of a publication or nothing of it. A reader finds the
//! newest manifest, reads the ends of its segments and then ranges, near ones in one request.
mod open;
mod publish;
mod store;

pub use open::open;
pub use publish::{publish, Published};
pub use store::Store;

use crate::error::{Error, Result};
use crate::manifest::{number_of, Found, Manifest};
use std::path::PathBuf;

/// How a store is used.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Ranges with at most this many bytes between them are read in one request.
    pub gap: u64,
    /// How often a request is repeated that the store refused for now (503, 429, a lost connection).
    pub retries: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { gap: 1 << 20, retries: 6 }
    }
}

/// Whether `text` names an object store and not a folder.
pub fn is_url(text: &str) -> bool {
    ["s3://", "s3a://", "gs://", "file://"].iter().any(|s| text.starts_with(s))
}

/// The newest manifest that holds, why newer ones do not, and the highest number taken.
struct Newest {
    found: Option<Found>,
    refused: Vec<String>,
    highest: u64,
    /// Names of all objects.
    names: Vec<String>,
}

fn newest(store: &Store) -> Result<Newest> {
    let names = store.names()?;
    let mut numbers: Vec<u64> = names.iter().filter_map(|n| number_of(n)).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    let highest = numbers.first().copied().unwrap_or(0);
    let mut out = Newest { found: None, refused: Vec::new(), highest, names };
    for number in numbers {
        let name = crate::manifest::file_name(number);
        let bytes = store.get(&name)?;
        let path = PathBuf::from(store.key(&name));
        match Manifest::decode(&bytes, &path) {
            Ok(m) if m.number == number => {
                out.found = Some((m, crate::crc32c(&bytes)));
                break;
            }
            Ok(m) => out.refused.push(format!("{} says that it is manifest {}", path.display(), m.number)),
            Err(e @ (Error::Corrupt { .. } | Error::Unsupported(_))) => out.refused.push(e.to_string()),
            Err(e) => return Err(e),
        }
    }
    Ok(out)
}
