//! Rebuilding the index of a segment that has none, beside it. The segment's own bytes are never touched.
use crate::crc::crc32c;
use crate::error::{Error, Result};
use crate::folder::segment_files;
use crate::index::Index;
use crate::layout::{FileHeader, Postscript, POST_LEN};
use crate::scan::{Bounds, Damage};
use crate::segment::{read_head, read_tail, recordless};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// What recovery found in one segment.
#[derive(Debug)]
pub struct Recovered {
    /// The segment.
    pub path: PathBuf,
    /// Committed trajectories that are readable.
    pub trajectories: u64,
    /// Bytes of its unfinished tail.
    pub torn_bytes: u64,
    /// Damage before the tail.
    pub interior: Vec<Damage>,
    /// The index file that was written; `None` if the segment has a good index of its own.
    pub sidecar: Option<PathBuf>,
}

/// The name of a segment's sidecar index.
pub fn sidecar_path(segment: &Path) -> PathBuf {
    let mut name = segment.as_os_str().to_owned();
    name.push(".tki");
    name.into()
}

/// The sidecar's index and the end of the records, if it is whole and was made from the segment as it is now.
pub fn read_sidecar(segment: &Path, header: &FileHeader, len: u64) -> Option<(Index, u64)> {
    let mut bytes = Vec::new();
    let file = File::open(sidecar_path(segment)).ok()?;
    // An index is smaller than the records that it lists.
    file.take(len.saturating_add(4096)).read_to_end(&mut bytes).ok()?;
    let split = bytes.len().checked_sub(POST_LEN)?;
    let post = Postscript::decode(&bytes[split..])?;
    bytes.truncate(split);
    let good = post.uuid_low == header.uuid_low()
        && post.file_len == len
        && post.index_len == split as u64
        && post.index_crc == crc32c(&bytes);
    let index = Index::from_bytes(bytes, post.n_chunks as usize, post.n_trajs as usize, segment).ok()?;
    good.then_some((index, post.index_off))
}

fn write_sidecar(segment: &Path, index: &Index, header: &FileHeader, records_end: u64, len: u64) -> Result<PathBuf> {
    let path = sidecar_path(segment);
    let temp = path.with_extension("tki.tmp");
    let post = Postscript {
        index_off: records_end,
        index_len: index.bytes().len() as u64,
        file_len: len,
        uuid_low: header.uuid_low(),
        n_chunks: index.n_chunks() as u32,
        n_trajs: index.n_trajs() as u32,
        index_crc: crc32c(index.bytes()),
    };
    let mut file = File::create(&temp).map_err(|e| Error::io(&temp, "create", e))?;
    file.write_all(index.bytes())
        .and_then(|()| file.write_all(&post.encode()))
        .and_then(|()| file.sync_all())
        .map_err(|e| {
            let _ = std::fs::remove_file(&temp); // on a full disk it would only take room
            Error::io(&temp, "write", e)
        })?;
    std::fs::rename(&temp, &path).map_err(|e| Error::io(&temp, "rename", e))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "fsync", e))?;
    Ok(path)
}

/// Recovers one segment.
pub fn recover_file(path: &Path) -> Result<Recovered> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let len = file.metadata().map_err(|e| Error::io(path, "stat", e))?.len();
    let mut out =
        Recovered { path: path.to_owned(), trajectories: 0, torn_bytes: 0, interior: Vec::new(), sidecar: None };
    let sealed = path.extension().is_some_and(|e| e == "tkg");
    let (header, schema) = match read_head(&file, path) {
        Ok(head) => head,
        Err(Error::Corrupt { offset, what, .. }) => {
            if recordless(path) {
                out.torn_bytes = len;
            } else {
                out.interior.push(Damage { offset, end: len, what, torn_tail: false });
            }
            return Ok(out);
        }
        Err(e) => return Err(e),
    };
    let mut end = len;
    let mut whole_index = false;
    if sealed {
        match read_tail(&file, path, len, &header)? {
            Ok((post, _)) => (end, whole_index) = (post.index_off, true),
            Err(damage) => out.interior.push(damage),
        }
    }
    let bounds = Bounds { file: &file, path, header: &header, sites: &schema.sites, end, sealed: whole_index };
    let scan = bounds.scan()?;
    out.trajectories = scan.builder.committed() as u64;
    for damage in scan.damage {
        match damage.torn_tail && !sealed {
            true => out.torn_bytes += damage.end - damage.offset,
            false if damage.torn_tail => {} // the index of a sealed file, whose damage is listed
            false => out.interior.push(damage),
        }
    }
    if !whole_index {
        let index = scan.builder.build();
        out.sidecar = Some(write_sidecar(path, &index, &header, scan.valid_end, len)?);
    }
    Ok(out)
}

/// Recovers every segment of a dataset.
pub fn recover(dir: &Path) -> Result<Vec<Recovered>> {
    segment_files(dir)?.iter().map(|p| recover_file(p)).collect()
}
