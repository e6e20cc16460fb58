//! One segment file being written.
use crate::chunk::{payload_crc, Encoder, SiteRows};
use crate::error::{Error, Result};
use crate::index::{ChunkEntry, IndexBuilder, Traj};
use crate::layout::{kind, padded, FileHeader, Postscript, RecordHeader, MAJOR, MINOR, RECORD_LEN};
use crate::schema::{Schema, Site};
use crc32c::crc32c;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes buffered before a write.
const BUFFER: usize = 1 << 20;

/// A chunk's place: trajectory number, tokens, sites.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Record type.
    pub kind: u8,
    /// Trajectory number in the segment.
    pub traj: u32,
    /// First token.
    pub tok0: u32,
    /// Number of tokens.
    pub ntok: u32,
    /// First site.
    pub site0: u16,
    /// Number of sites.
    pub nsites: u16,
    /// CRC32C of the token ids.
    pub token_crc: u32,
}

/// A `.tkg.open` file.
pub struct SegmentFile {
    file: File,
    path: PathBuf,
    uuid_low: u64,
    buf: Vec<u8>,
    written: u64,
    seq: u64,
    next_traj: u32,
    builder: IndexBuilder,
    /// Trajectories begun and neither committed nor dropped.
    pub open_trajs: u32,
    /// Whether new trajectories go to a later segment.
    pub full: bool,
}

impl SegmentFile {
    /// Creates `dir/name.tkg.open` and writes header and schema.
    pub fn create(dir: &Path, name: &str, schema: &Schema) -> Result<Self> {
        let path = dir.join(format!("{name}.tkg.open"));
        let file =
            OpenOptions::new().write(true).create_new(true).open(&path).map_err(|e| Error::io(&path, "create", e))?;
        let mut uuid = [0u8; 16];
        getrandom::fill(&mut uuid).map_err(|e| Error::io(&path, "make an identity for", std::io::Error::other(e)))?;
        let mut bytes = schema.encode()?;
        let schema_len = bytes.len() as u32;
        bytes.resize(padded(bytes.len()), 0);
        let header = FileHeader {
            major: MAJOR,
            minor: MINOR,
            incompat: schema.features(),
            compat: 0,
            uuid,
            created_ns: SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_nanos() as u64).unwrap_or(0),
            schema_len,
            schema_crc: crc32c(&bytes),
        };
        let mut buf = header.encode();
        buf.extend_from_slice(&bytes);
        let mut out = SegmentFile {
            file,
            path,
            uuid_low: header.uuid_low(),
            buf,
            written: 0,
            seq: 0,
            next_traj: 0,
            builder: IndexBuilder::default(),
            open_trajs: 0,
            full: false,
        };
        out.flush()?;
        Ok(out)
    }

    /// Bytes of the file, buffered ones included.
    pub fn len(&self) -> u64 {
        self.written + self.buf.len() as u64
    }

    /// Bytes not written yet.
    pub fn buffered(&self) -> usize {
        self.buf.len()
    }

    /// A number for a new trajectory.
    pub fn begin(&mut self) -> u32 {
        self.open_trajs += 1;
        self.next_traj += 1;
        self.next_traj - 1
    }

    fn record(
        &mut self,
        mut h: RecordHeader,
        sites: &[Site],
        fill: impl FnOnce(&mut Vec<u8>) -> u8,
    ) -> (u64, RecordHeader) {
        let off = self.len();
        let at = self.buf.len();
        self.buf.resize(at + RECORD_LEN, 0);
        h.flags = fill(&mut self.buf);
        h.len = (self.buf.len() - at - RECORD_LEN) as u64;
        self.buf.resize(at + RECORD_LEN + h.padded_len() as usize, 0);
        h.payload_crc = payload_crc(h.flags, &self.buf[at + RECORD_LEN..], h.len as usize, sites);
        h.seq = self.seq;
        h.uuid_low = self.uuid_low;
        self.seq += 1;
        self.buf[at..at + RECORD_LEN].copy_from_slice(&h.encode());
        (off, h)
    }

    /// Appends a chunk.
    pub fn chunk(&mut self, place: Place, sites: &[Site], rows: &[SiteRows], encoder: &mut Encoder) -> Result<()> {
        self.append(place, sites, |out| encoder.encode(sites, rows, place.ntok as usize, out))
    }

    /// Appends a chunk that is encoded already.
    pub fn encoded(&mut self, place: Place, sites: &[Site], payload: &[u8], flags: u8) -> Result<()> {
        self.append(place, sites, |out| {
            out.extend_from_slice(payload);
            flags
        })
    }

    fn append(&mut self, place: Place, sites: &[Site], fill: impl FnOnce(&mut Vec<u8>) -> u8) -> Result<()> {
        let header = RecordHeader {
            kind: place.kind,
            traj: place.traj,
            tok0: place.tok0,
            ntok: place.ntok,
            site0: place.site0,
            nsites: place.nsites,
            token_crc: place.token_crc,
            ..RecordHeader::default()
        };
        let (off, h) = self.record(header, sites, fill);
        self.builder.chunk(ChunkEntry::new(&h, off));
        if self.buf.len() >= BUFFER {
            self.flush()?;
        }
        Ok(())
    }

    /// Appends a commit record; it is on disk after the next [`flush`](Self::flush).
    pub fn commit(&mut self, traj: Traj) {
        let header = RecordHeader { kind: kind::TRAJ, traj: traj.number, ..RecordHeader::default() };
        self.record(header, &[], |out| {
            out.extend_from_slice(&traj.encode());
            0
        });
        self.builder.commit(traj);
        self.open_trajs -= 1;
    }

    /// Hands everything buffered to the operating system.
    pub fn flush(&mut self) -> Result<()> {
        self.file.write_all(&self.buf).map_err(|e| Error::io(&self.path, "write", e))?;
        self.written += self.buf.len() as u64;
        self.buf.clear();
        Ok(())
    }

    /// Makes everything flushed survive a power loss.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io(&self.path, "fsync", e))
    }

    /// Writes index and postscript and gives the file its final name; returns its size.
    pub fn seal(mut self) -> Result<u64> {
        let index = std::mem::take(&mut self.builder).build();
        let index_off = self.len();
        self.buf.extend_from_slice(index.bytes());
        let post = Postscript {
            index_off,
            index_len: index.bytes().len() as u64,
            file_len: self.len() + crate::layout::POST_LEN as u64,
            uuid_low: self.uuid_low,
            n_chunks: index.n_chunks() as u32,
            n_trajs: index.n_trajs() as u32,
            index_crc: crc32c(index.bytes()),
        };
        self.buf.extend_from_slice(&post.encode());
        self.flush()?;
        self.file.sync_all().map_err(|e| Error::io(&self.path, "fsync", e))?;
        let sealed = self.path.with_extension("");
        std::fs::rename(&self.path, &sealed).map_err(|e| Error::io(&self.path, "rename", e))?;
        let dir = sealed.parent().unwrap_or(Path::new("."));
        File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "fsync", e))?;
        Ok(self.written)
    }
}
