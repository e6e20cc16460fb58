//! Opening a published dataset.
use super::store::{Object, Store};
use super::{newest, Options};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::manifest::{file_name, Entry};
use crate::segment::Segment;
use crate::source::{Blocks, Overlay};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a segment's start and end that are read at once: header and schema, index and postscript.
const END: u64 = 64 << 10;

/// Opens what the newest valid manifest under `url` lists.
pub fn open(url: &str, options: Options) -> Result<Dataset> {
    let store = Arc::new(Store::new(url, options)?);
    let newest = newest(&store)?;
    let Some((manifest, _)) = newest.found else {
        return Err(Error::Missing(match newest.refused.first() {
            Some(why) => format!("no manifest under {} holds: {why}", store.url()),
            None => format!(
                "{} has no manifest (manifest-000001 …): publish a folder there with `tracekit guidance publish`, or \
                 check the url",
                store.url()
            ),
        }));
    };
    let mut wanted: Vec<(&str, Range<u64>)> = Vec::new();
    for e in &manifest.segments {
        if e.bytes <= 2 * END {
            wanted.push((&e.name, 0..e.bytes));
        } else {
            wanted.extend([(&*e.name, 0..END), (&*e.name, e.bytes - END..e.bytes)]);
        }
    }
    wanted.retain(|w| !w.1.is_empty());
    let listed = |e: Error| match e {
        Error::Missing(text) => Error::Missing(format!("{text} ({} lists it)", file_name(manifest.number))),
        e => e,
    };
    let ends = store.ranges(&wanted).map_err(listed)?;
    let mut ends: Vec<_> = wanted.iter().zip(ends).collect();
    let mut segments = Vec::with_capacity(manifest.segments.len());
    for entry in &manifest.segments {
        let own: Vec<(u64, Vec<u8>)> = ends
            .iter_mut()
            .filter(|(w, _)| w.0 == entry.name)
            .map(|(w, bytes)| (w.1.start, std::mem::take(bytes)))
            .collect();
        segments.push(segment(&store, entry, Blocks::new(own))?);
    }
    Ok(Dataset::of(Path::new(store.url()), segments, Some(manifest.number), newest.refused))
}

fn segment(store: &Arc<Store>, entry: &Entry, ends: Blocks) -> Result<Segment> {
    let path = PathBuf::from(store.key(&entry.name));
    let object = Object { store: store.clone(), name: entry.name.clone() };
    let again = Object { store: store.clone(), name: entry.name.clone() };
    let first = Overlay { source: &again, blocks: &ends };
    Segment::open_listed(&path, Box::new(object), &first, entry)
}
