//! Opening one segment file.
use crate::crc::crc32c;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::layout::{padded, FileHeader, Postscript, HEADER_LEN, POST_LEN};
use crate::manifest::Entry;
use crate::scan::{Bounds, Damage};
use crate::schema::Schema;
use crate::source::ReadAt;
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// How chunks are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// `pread` into buffers.
    #[default]
    Read,
    /// From a memory map: one copy less. Whoever shortens a mapped file kills its readers (SIGBUS), which a writer of
    /// ours never does.
    Map,
}

/// An open segment.
#[derive(Debug)]
pub struct Segment {
    /// Its file name.
    pub path: PathBuf,
    /// Its bytes.
    pub source: Box<dyn ReadAt>,
    /// Its length when it was opened.
    pub len: u64,
    /// Its header.
    pub header: FileHeader,
    /// Its schema.
    pub schema: Schema,
    /// Its index, read or rebuilt.
    pub index: Index,
    /// Where its records end.
    pub records_end: u64,
    /// Whether it was sealed by its writer.
    pub sealed: bool,
    /// What did not pass its checks while opening.
    pub damage: Vec<Damage>,
    map: Option<Mmap>,
}

/// Reads and checks header and schema.
pub fn read_head(file: &dyn ReadAt, path: &Path) -> Result<(FileHeader, Schema)> {
    let read = |buf: &mut [u8], at: u64| {
        file.read_exact_at(buf, at).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::corrupt(path, at, "the file ends inside its header"),
            _ => Error::io(path, "read", e),
        })
    };
    let mut head = vec![0u8; HEADER_LEN];
    read(&mut head, 0)?;
    let header = FileHeader::decode(&head, path)?;
    let mut bytes = vec![0u8; padded(header.schema_len as usize)];
    read(&mut bytes, HEADER_LEN as u64)?;
    if crc32c(&bytes) != header.schema_crc {
        return Err(Error::corrupt(path, HEADER_LEN as u64, "schema checksum"));
    }
    let schema = Schema::decode(&bytes[..header.schema_len as usize])
        .map_err(|e| Error::corrupt(path, HEADER_LEN as u64, e.to_string()))?;
    Ok((header, schema))
}

/// Whether an unsealed file, whose head [`read_head`] refuses, never got a record: its writer died, or is still, before
/// the first one. The file ends within its head, or holds only zeros from one of the head's pages on, as after a power
/// cut that kept the length and lost the data.
pub fn recordless(path: &Path) -> bool {
    let found = || -> std::io::Result<bool> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        let mut head = vec![0u8; HEADER_LEN];
        if len < HEADER_LEN as u64 {
            return Ok(true);
        }
        ReadAt::read_exact_at(&file, &mut head, 0)?;
        let mut from = 0;
        if let Ok(header) = FileHeader::decode(&head, path) {
            if len < header.first_record() {
                return Ok(true);
            }
            from = (header.first_record() - 1) / HEADER_LEN as u64 * HEADER_LEN as u64;
        }
        file.seek(SeekFrom::Start(from))?;
        let mut some = vec![0u8; 1 << 16];
        loop {
            match file.read(&mut some)? {
                0 => return Ok(true),
                n if some[..n].iter().any(|b| *b != 0) => return Ok(false),
                _ => {}
            }
        }
    };
    path.extension().is_some_and(|e| e == "open") && found().unwrap_or(false)
}

/// Reads and checks postscript and index; the error says what is wrong with which bytes.
pub fn read_tail(
    file: &dyn ReadAt,
    path: &Path,
    len: u64,
    header: &FileHeader,
) -> Result<std::result::Result<(Postscript, Index), Damage>> {
    let fail = |offset: u64, end: u64, what: &str| Ok(Err(Damage { offset, end, what: what.into(), torn_tail: false }));
    let post_at = len.saturating_sub(POST_LEN as u64);
    if post_at < header.first_record() {
        return fail(header.first_record().min(len), len, "the file ends before its postscript");
    }
    let mut b = [0u8; POST_LEN];
    file.read_exact_at(&mut b, post_at).map_err(|e| Error::io(path, "read", e))?;
    let Some(post) = Postscript::decode(&b) else {
        return fail(post_at, len, "postscript checksum");
    };
    if post.uuid_low != header.uuid_low()
        || post.file_len != len
        || post.index_off < header.first_record()
        || post.index_off > post_at
        || post.index_len != post_at - post.index_off
    {
        return fail(post_at, len, "postscript does not fit its file");
    }
    let mut bytes = vec![0u8; post.index_len as usize];
    file.read_exact_at(&mut bytes, post.index_off).map_err(|e| Error::io(path, "read", e))?;
    if crc32c(&bytes) != post.index_crc {
        return fail(post.index_off, post_at, "index checksum");
    }
    match Index::from_bytes(bytes, post.n_chunks as usize, post.n_trajs as usize, path) {
        Ok(index) => Ok(Ok((post, index))),
        Err(_) => fail(post.index_off, post_at, "index is shorter than its tables"),
    }
}

impl Segment {
    /// Opens the sealed segment that a manifest lists, whose bytes are `source`.
    pub fn open_listed(path: &Path, source: Box<dyn ReadAt>, first: &dyn ReadAt, entry: &Entry) -> Result<Self> {
        let (header, schema) = read_head(first, path)?;
        let (post, index) = match read_tail(first, path, entry.bytes, &header)? {
            Ok(tail) => tail,
            Err(damage) => return Err(Error::corrupt(path, damage.offset, damage.what)),
        };
        if !entry.matches(&header, &post, &index) {
            return Err(Error::corrupt(path, 0, "it is not the segment that the manifest lists"));
        }
        let path = path.to_owned();
        let (len, records_end) = (entry.bytes, post.index_off);
        let damage = Vec::new();
        Ok(Segment { path, source, len, header, schema, index, records_end, sealed: true, damage, map: None })
    }

    /// Opens a sealed segment by its index, an unsealed or damaged one by the sidecar that recovery left, or by a walk
    /// over its records.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
        let len = file.metadata().map_err(|e| Error::io(path, "stat", e))?.len();
        let (header, schema) = read_head(&file, path)?;
        let sealed = path.extension().is_some_and(|e| e == "tkg");
        let (index, records_end, damage) = Self::index_of(&file, path, len, &header, &schema, sealed)?;
        let (path, source) = (path.to_owned(), Box::new(file));
        Ok(Segment { path, source, len, header, schema, index, records_end, sealed, damage, map: None })
    }

    /// A file's index, where its records end, and what did not pass its checks.
    fn index_of(
        file: &File,
        path: &Path,
        len: u64,
        header: &FileHeader,
        schema: &Schema,
        sealed: bool,
    ) -> Result<(Index, u64, Vec<Damage>)> {
        let mut damage = Vec::new();
        if sealed {
            match read_tail(file, path, len, header)? {
                Ok((post, index)) => return Ok((index, post.index_off, damage)),
                Err(d) => damage.push(d),
            }
        }
        if let Some((index, records_end)) = crate::recover::read_sidecar(path, header, len) {
            return Ok((index, records_end, Vec::new()));
        }
        let end = len.max(header.first_record()).min(len);
        let scan = Bounds { file, path, header, sites: &schema.sites, end, sealed: false }.scan()?;
        damage.extend(scan.damage.into_iter().filter(|d| !d.torn_tail));
        Ok((scan.builder.build(), scan.valid_end, damage))
    }

    /// Maps the file, as long as it was when it was opened. What is no file stays as it is.
    pub fn map_file(&mut self) -> Result<()> {
        let Some(file) = self.source.as_file() else { return Ok(()) };
        let len = self.len as usize;
        // SAFETY: every read goes through a checksum over the same bytes; a file that is shortened is documented.
        let map = unsafe { MmapOptions::new().len(len).map(file) };
        self.map = Some(map.map_err(|e| Error::io(&self.path, "map", e))?);
        Ok(())
    }

    /// The mapped file.
    pub fn map(&self) -> Option<&[u8]> {
        self.map.as_deref()
    }
}
