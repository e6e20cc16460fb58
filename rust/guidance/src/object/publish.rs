//! Copying a folder's sealed segments to an object store.
use super::store::Store;
use super::{newest, Options};
use crate::error::{Error, Result};
use crate::manifest::{file_name, sealed, Manifest};
use std::path::Path;

/// What a publication did.
#[derive(Clone, Debug)]
pub struct Published {
    /// Number of the newest manifest.
    pub number: u64,
    /// Segments that it lists.
    pub segments: usize,
    /// Segments uploaded now.
    pub uploaded: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Segments that are still being written, or whose writer died: they are not published.
    pub unsealed: usize,
}

/// Uploads the sealed segments of `dir` that are not under `url` yet, then a manifest that lists them with those that
/// others published there. If it fails halfway readers see what they saw before, and a repetition goes on from there.
pub fn publish(dir: &Path, url: &str, options: Options) -> Result<Published> {
    let entries = sealed(dir, None)?;
    let files = crate::folder::segment_files(dir)?;
    let unsealed = files.len() - entries.len();
    if entries.is_empty() {
        return Err(Error::Missing(format!(
            "{} holds no sealed segment (*.tkg): close the writer, or check the folder",
            dir.display()
        )));
    }
    let store = Store::new(url, options)?;
    let mut out = Published { number: 0, segments: 0, uploaded: 0, bytes: 0, unsealed };
    let mut there: Vec<String> = Vec::new();
    loop {
        let now = newest(&store)?;
        let mut all = now.found.as_ref().map(|(m, _)| m.segments.clone()).unwrap_or_default();
        for e in &entries {
            let mut listed = false;
            match all.iter().find(|o| o.name == e.name) {
                Some(other) if other == e => {
                    // Somebody may have deleted it since.
                    listed = true;
                    if now.names.contains(&e.name) || there.contains(&e.name) {
                        continue;
                    }
                }
                Some(_) => {
                    return Err(Error::Mismatch(format!(
                        "{} is another segment than the one in {}: publish this folder under a prefix of its own",
                        store.key(&e.name),
                        dir.display()
                    )))
                }
                None => {}
            }
            if !there.contains(&e.name) {
                store.upload(&e.name, &crate::folder::segment_path(dir, &e.name), e.bytes)?;
                there.push(e.name.clone());
                (out.uploaded, out.bytes) = (out.uploaded + 1, out.bytes + e.bytes);
            }
            if !listed {
                all.push(e.clone());
            }
        }
        let parent = now.found.as_ref().map(|(m, crc)| (m, *crc));
        let next = Manifest::after(parent, now.highest + 1, all);
        if let Some((m, _)) = parent.filter(|(m, _)| m.segments == next.segments) {
            return Ok(Published { number: m.number, segments: m.segments.len(), ..out });
        }
        if store.create(&file_name(next.number), &next.encode()?)? {
            return Ok(Published { number: next.number, segments: next.segments.len(), ..out });
        }
        // Another publication took the number: list its segments too.
    }
}
