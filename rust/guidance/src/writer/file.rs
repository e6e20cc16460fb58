//! One segment file being written.
use super::output::Output;
use super::Mode;
use crate::chunk::{payload_crc, Payload};
use crate::crc::crc32c;
use crate::error::{Error, Result};
use crate::index::{ChunkEntry, IndexBuilder};
use crate::layout::{kind, padded, FileHeader, Postscript, RecordHeader, ALIGN, FEATURE_AUDIT, MAJOR, MINOR};
use crate::schema::{Schema, Site};
use crate::traj::Traj;
use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes buffered before a write.
const BUFFER: usize = 1 << 20;
/// Payloads of this many bytes are written from where they are, without a copy.
const DIRECT: usize = 64 << 10;

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
    out: Output,
    path: PathBuf,
    uuid_low: u64,
    buf: Vec<u8>,
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
    pub fn create(dir: &Path, name: &str, schema: &Schema, mode: Mode) -> Result<Self> {
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
            compat: FEATURE_AUDIT,
            uuid,
            created_ns: SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_nanos() as u64).unwrap_or(0),
            schema_len,
            schema_crc: crc32c(&bytes),
        };
        let mut buf = header.encode();
        buf.extend_from_slice(&bytes);
        let mut out = SegmentFile {
            out: Output::new(file, mode),
            path,
            uuid_low: header.uuid_low(),
            buf,
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
        self.out.len() + self.buf.len() as u64
    }

    /// How bytes really get to the file.
    pub fn mode(&self) -> Mode {
        self.out.mode()
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

    /// Completes a header and puts it into the buffer, before a payload of `len` bytes. Returns where it is.
    fn header(&mut self, mut h: RecordHeader, len: usize, payload_crc: u32) -> (u64, RecordHeader) {
        let off = self.len();
        h.len = len as u64;
        h.payload_crc = payload_crc;
        h.seq = self.seq;
        h.uuid_low = self.uuid_low;
        self.seq += 1;
        self.buf.extend_from_slice(&h.encode());
        (off, h)
    }

    /// Appends a chunk.
    pub fn chunk(&mut self, place: Place, sites: &[Site], payload: &Payload, flags: u8) -> Result<()> {
        let header = RecordHeader {
            kind: place.kind,
            flags,
            traj: place.traj,
            tok0: place.tok0,
            ntok: place.ntok,
            site0: place.site0,
            nsites: place.nsites,
            token_crc: place.token_crc,
            ..RecordHeader::default()
        };
        let len = payload.len();
        let padding = &[0u8; ALIGN][..padded(len) - len];
        let crc = payload_crc(flags, &payload.bytes, padding, sites);
        let (off, h) = self.header(header, len, crc);
        self.builder.chunk(ChunkEntry::new(&h, off));
        if len >= DIRECT {
            return self.write_behind(payload, padding);
        }
        payload.pieces().chain([padding]).for_each(|p| self.buf.extend_from_slice(p));
        if self.buf.len() >= BUFFER {
            self.drain()?;
        }
        Ok(())
    }

    /// Writes the buffer and, behind it, a payload, from where they are.
    fn write_behind(&mut self, payload: &Payload, padding: &[u8]) -> Result<()> {
        let pieces = [&self.buf[..]].into_iter().chain(payload.pieces()).chain([padding]);
        let mut slices: Vec<IoSlice> = pieces.map(IoSlice::new).collect();
        self.out.write(&mut slices).map_err(|e| Error::io(&self.path, "write", e))?;
        self.buf.clear();
        Ok(())
    }

    /// Appends a commit record; it is on disk after the next [`flush`](Self::flush).
    pub fn commit(&mut self, traj: Traj) {
        let header = RecordHeader { kind: kind::TRAJ, traj: traj.number, ..RecordHeader::default() };
        let mut bytes = traj.encode();
        let len = bytes.len();
        bytes.resize(padded(len), 0);
        self.header(header, len, crc32c(&bytes));
        self.buf.extend_from_slice(&bytes);
        self.builder.commit(traj);
        self.open_trajs -= 1;
    }

    /// Hands everything buffered to the operating system.
    pub fn flush(&mut self) -> Result<()> {
        self.drain()?;
        self.out.flush().map_err(|e| Error::io(&self.path, "write", e))
    }

    fn drain(&mut self) -> Result<()> {
        self.out.write(&mut [IoSlice::new(&self.buf)]).map_err(|e| Error::io(&self.path, "write", e))?;
        self.buf.clear();
        Ok(())
    }

    /// Makes everything flushed survive a power loss.
    pub fn sync(&self) -> Result<()> {
        self.out.sync().map_err(|e| Error::io(&self.path, "fsync", e))
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
        let bytes = self.out.len();
        self.out.close().map_err(|(op, e)| Error::io(&self.path, op, e))?;
        let sealed = self.path.with_extension("");
        std::fs::rename(&self.path, &sealed).map_err(|e| Error::io(&self.path, "rename", e))?;
        sync_folder(sealed.parent().unwrap_or(Path::new(".")))?;
        Ok(bytes)
    }
}

/// Makes the names in a folder survive a power loss.
pub fn sync_folder(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "fsync", e))
}
