//! Checking every byte of a dataset.
use crate::error::{Error, Result};
use crate::folder::segment_files;
use crate::scan::{Bounds, Damage};
use crate::segment::{read_head, read_tail, recordless};
use std::fs::File;
use std::path::{Path, PathBuf};

/// What the check of one file found.
#[derive(Debug)]
pub struct FileReport {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Valid records.
    pub records: u64,
    /// Committed trajectories.
    pub trajectories: u64,
    /// Whether its writer sealed it.
    pub sealed: bool,
    /// Damaged ranges.
    pub damage: Vec<Damage>,
}

/// Checks header, schema, every record, index and postscript of one file.
pub fn verify_file(path: &Path) -> Result<FileReport> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let len = file.metadata().map_err(|e| Error::io(path, "stat", e))?.len();
    let sealed = path.extension().is_some_and(|e| e == "tkg");
    let mut report =
        FileReport { path: path.to_owned(), bytes: len, records: 0, trajectories: 0, sealed, damage: vec![] };
    let (header, schema) = match read_head(&file, path) {
        Ok(head) => head,
        Err(Error::Corrupt { offset, what, .. }) => {
            let torn_tail = recordless(path);
            report.damage.push(Damage { offset, end: len, what, torn_tail });
            return Ok(report);
        }
        Err(e) => return Err(e),
    };
    let mut end = len;
    let mut tail = None;
    if sealed {
        match read_tail(&file, path, len, &header)? {
            Ok((post, index)) => {
                end = post.index_off;
                tail = Some(index);
            }
            Err(d) => {
                end = d.offset;
                report.damage.push(d);
            }
        }
    }
    let bounds = Bounds { file: &file, path, header: &header, sites: &schema.sites, end, sealed };
    let scan = bounds.scan()?;
    report.records = scan.records;
    report.trajectories = scan.builder.committed() as u64;
    let clean = scan.damage.is_empty();
    let mut found = scan.damage;
    if let (Some(post), Some(last)) = (report.damage.last_mut(), found.last()) {
        // Without a postscript nobody knows where the records end: what follows the last of them is the index.
        if sealed && last.end == post.offset && last.what == "record header" {
            post.offset = last.offset;
            post.what += "; the index before it was not checked";
            found.pop();
        }
    }
    report.damage.extend(found);
    if let Some(index) = tail.filter(|_| clean) {
        if scan.builder.build().bytes() != index.bytes() {
            let what = "index does not match the records".into();
            report.damage.push(Damage { offset: end, end: len, what, torn_tail: false });
        }
    }
    report.damage.sort_by_key(|d| d.offset);
    Ok(report)
}

/// Checks every segment of a dataset.
pub fn verify(dir: &Path) -> Result<Vec<FileReport>> {
    segment_files(dir)?.iter().map(|p| verify_file(p)).collect()
}
