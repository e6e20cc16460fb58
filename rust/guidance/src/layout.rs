//! The fixed structures of a segment: file header, record header, postscript. All little-endian.
use crate::crc::crc32c;
use crate::error::{Error, Result};
use std::path::Path;

/// First bytes of a segment.
pub const MAGIC: [u8; 8] = *b"\x89TKG\r\n\x1a\n";
/// First bytes of a record.
pub const RECORD_MAGIC: [u8; 4] = *b"TKR1";
/// First bytes of the postscript.
pub const POST_MAGIC: [u8; 4] = *b"TKP1";
/// Last bytes of a sealed segment.
pub const END_MAGIC: [u8; 8] = *b"TKGEND\r\n";
/// Format version that this crate writes. Another major is refused.
pub const MAJOR: u16 = 1;
/// Minor version: readers accept any.
pub const MINOR: u16 = 0;
/// Incompatible features that this crate understands.
pub const KNOWN_INCOMPAT: u64 = FEATURE_COSET | FEATURE_SPLIT;
/// Incompatible feature: some site uses `compact`, `low2` or `rm15`.
pub const FEATURE_COSET: u64 = 1;
/// Compatible feature: the segment may hold audit records.
pub const FEATURE_AUDIT: u64 = 1;
/// Incompatible feature: some site holds only some of its planes, the others are in other segments.
pub const FEATURE_SPLIT: u64 = 2;
/// Bytes of the file header.
pub const HEADER_LEN: usize = 4096;
/// Bytes of a record header.
pub const RECORD_LEN: usize = 64;
/// Bytes of the postscript.
pub const POST_LEN: usize = 64;
/// Records, schema and index start at multiples of this.
pub const ALIGN: usize = 8;
/// Largest payload of one record.
pub const MAX_PAYLOAD: u64 = 64 << 20;
/// Largest schema.
pub const MAX_SCHEMA: u32 = 1 << 20;
/// Most tokens of one chunk.
pub const MAX_CHUNK_TOKENS: u32 = 65_536;
/// Longest trajectory id in bytes.
pub const MAX_ID: usize = 255;

/// Record types.
pub mod kind {
    /// A preallocated hole.
    pub const HOLE: u8 = 0;
    /// Rows of one trajectory: a token range times a site range.
    pub const CHUNK: u8 = 1;
    /// A trajectory's commit.
    pub const TRAJ: u8 = 2;
    /// Full codes and scales of sampled tokens.
    pub const AUDIT: u8 = 3;
}

/// `len` rounded up to [`ALIGN`].
pub const fn padded(len: usize) -> usize {
    len.div_ceil(ALIGN) * ALIGN
}

pub(crate) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(b[at..at + 2].try_into().unwrap())
}
pub(crate) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().unwrap())
}
pub(crate) fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}
pub(crate) fn i64_at(b: &[u8], at: usize) -> i64 {
    i64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}
pub(crate) fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The file header: who wrote the segment and where its schema lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileHeader {
    /// Major format version.
    pub major: u16,
    /// Minor format version.
    pub minor: u16,
    /// Features a reader must know.
    pub incompat: u64,
    /// Features a reader may ignore.
    pub compat: u64,
    /// Random identity of the segment.
    pub uuid: [u8; 16],
    /// Time of creation, nanoseconds since 1970.
    pub created_ns: u64,
    /// Bytes of the schema, which starts at byte 4096.
    pub schema_len: u32,
    /// CRC32C of the schema and its padding.
    pub schema_crc: u32,
}

impl FileHeader {
    /// The low 8 bytes of the uuid, repeated in every record.
    pub fn uuid_low(&self) -> u64 {
        u64_at(&self.uuid, 0)
    }

    /// Offset of the first record.
    pub fn first_record(&self) -> u64 {
        (HEADER_LEN + padded(self.schema_len as usize)) as u64
    }

    /// The 4096 bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0u8; HEADER_LEN];
        put(&mut b, 0, &MAGIC);
        put(&mut b, 8, &self.major.to_le_bytes());
        put(&mut b, 10, &self.minor.to_le_bytes());
        put(&mut b, 12, &(HEADER_LEN as u32).to_le_bytes());
        put(&mut b, 16, &self.incompat.to_le_bytes());
        put(&mut b, 24, &self.compat.to_le_bytes());
        put(&mut b, 32, &self.uuid);
        put(&mut b, 48, &self.created_ns.to_le_bytes());
        put(&mut b, 56, &(HEADER_LEN as u64).to_le_bytes());
        put(&mut b, 64, &self.schema_len.to_le_bytes());
        put(&mut b, 68, &self.schema_crc.to_le_bytes());
        let crc = crc32c(&b[..HEADER_LEN - 4]);
        put(&mut b, HEADER_LEN - 4, &crc.to_le_bytes());
        b
    }

    /// Parses and checks the 4096 bytes `b` of `path`.
    pub fn decode(b: &[u8], path: &Path) -> Result<Self> {
        if b.len() < HEADER_LEN {
            return Err(Error::corrupt(path, 0, format!("{} bytes are too few for a header", b.len())));
        }
        if b[..8] != MAGIC {
            return Err(Error::corrupt(path, 0, "this is not a guidance segment (magic)"));
        }
        if crc32c(&b[..HEADER_LEN - 4]) != u32_at(b, HEADER_LEN - 4) {
            return Err(Error::corrupt(path, 0, "header checksum"));
        }
        let h = FileHeader {
            major: u16_at(b, 8),
            minor: u16_at(b, 10),
            incompat: u64_at(b, 16),
            compat: u64_at(b, 24),
            uuid: b[32..48].try_into().unwrap(),
            created_ns: u64_at(b, 48),
            schema_len: u32_at(b, 64),
            schema_crc: u32_at(b, 68),
        };
        if h.major != MAJOR {
            return Err(Error::Unsupported(format!(
                "{} has format version {}.{}, this build reads {MAJOR}.x: use the tracekit that wrote it",
                path.display(),
                h.major,
                h.minor
            )));
        }
        if h.incompat & !KNOWN_INCOMPAT != 0 {
            return Err(Error::Unsupported(format!(
                "{} needs features {:#x} that this build lacks: use a newer tracekit",
                path.display(),
                h.incompat & !KNOWN_INCOMPAT
            )));
        }
        if h.schema_len > MAX_SCHEMA {
            return Err(Error::corrupt(path, 64, format!("schema of {} bytes", h.schema_len)));
        }
        Ok(h)
    }
}

/// The 64 bytes before every payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordHeader {
    /// One of [`kind`].
    pub kind: u8,
    /// Layout flags of a chunk.
    pub flags: u8,
    /// Bytes of the payload, padding not counted.
    pub len: u64,
    /// Number of the record in its segment, from 0.
    pub seq: u64,
    /// The segment's identity.
    pub uuid_low: u64,
    /// CRC32C of payload and padding.
    pub payload_crc: u32,
    /// Trajectory number in the segment.
    pub traj: u32,
    /// First token.
    pub tok0: u32,
    /// Number of tokens.
    pub ntok: u32,
    /// First site (index in the schema).
    pub site0: u16,
    /// Number of sites.
    pub nsites: u16,
    /// CRC32C of the tokens' ids as little-endian int64.
    pub token_crc: u32,
}

impl RecordHeader {
    /// Payload with its padding.
    pub fn padded_len(&self) -> u64 {
        self.len.div_ceil(ALIGN as u64) * ALIGN as u64
    }

    /// The 64 bytes on disk.
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let mut b = [0u8; RECORD_LEN];
        put(&mut b, 0, &RECORD_MAGIC);
        b[4] = self.kind;
        b[5] = self.flags;
        put(&mut b, 8, &self.len.to_le_bytes());
        put(&mut b, 16, &self.seq.to_le_bytes());
        put(&mut b, 24, &self.uuid_low.to_le_bytes());
        put(&mut b, 32, &self.payload_crc.to_le_bytes());
        put(&mut b, 36, &self.traj.to_le_bytes());
        put(&mut b, 40, &self.tok0.to_le_bytes());
        put(&mut b, 44, &self.ntok.to_le_bytes());
        put(&mut b, 48, &self.site0.to_le_bytes());
        put(&mut b, 50, &self.nsites.to_le_bytes());
        put(&mut b, 52, &self.token_crc.to_le_bytes());
        let crc = crc32c(&b[..60]);
        put(&mut b, 60, &crc.to_le_bytes());
        b
    }

    /// Parses a header; `None` if magic or checksum fail.
    pub fn decode(b: &[u8]) -> Option<Self> {
        if b.len() < RECORD_LEN || b[..4] != RECORD_MAGIC || crc32c(&b[..60]) != u32_at(b, 60) {
            return None;
        }
        Some(RecordHeader {
            kind: b[4],
            flags: b[5],
            len: u64_at(b, 8),
            seq: u64_at(b, 16),
            uuid_low: u64_at(b, 24),
            payload_crc: u32_at(b, 32),
            traj: u32_at(b, 36),
            tok0: u32_at(b, 40),
            ntok: u32_at(b, 44),
            site0: u16_at(b, 48),
            nsites: u16_at(b, 50),
            token_crc: u32_at(b, 52),
        })
    }
}

/// The last 64 bytes of a sealed segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Postscript {
    /// Offset of the index.
    pub index_off: u64,
    /// Bytes of the index, padding included.
    pub index_len: u64,
    /// Length of the file.
    pub file_len: u64,
    /// The segment's identity.
    pub uuid_low: u64,
    /// Entries of the chunk table.
    pub n_chunks: u32,
    /// Entries of the trajectory table.
    pub n_trajs: u32,
    /// CRC32C of the index.
    pub index_crc: u32,
}

impl Postscript {
    /// The 64 bytes on disk.
    pub fn encode(&self) -> [u8; POST_LEN] {
        let mut b = [0u8; POST_LEN];
        put(&mut b, 0, &POST_MAGIC);
        put(&mut b, 4, &MAJOR.to_le_bytes());
        put(&mut b, 6, &MINOR.to_le_bytes());
        put(&mut b, 8, &self.index_off.to_le_bytes());
        put(&mut b, 16, &self.index_len.to_le_bytes());
        put(&mut b, 24, &self.file_len.to_le_bytes());
        put(&mut b, 32, &self.uuid_low.to_le_bytes());
        put(&mut b, 40, &self.n_chunks.to_le_bytes());
        put(&mut b, 44, &self.n_trajs.to_le_bytes());
        put(&mut b, 48, &self.index_crc.to_le_bytes());
        put(&mut b, 56, &END_MAGIC);
        let crc = crc32c(&b);
        put(&mut b, 52, &crc.to_le_bytes());
        b
    }

    /// Parses a postscript; `None` if magic or checksum fail.
    pub fn decode(b: &[u8]) -> Option<Self> {
        if b.len() != POST_LEN || b[..4] != POST_MAGIC || b[56..] != END_MAGIC {
            return None;
        }
        let mut zeroed = [0u8; POST_LEN];
        zeroed.copy_from_slice(b);
        zeroed[52..56].fill(0);
        if crc32c(&zeroed) != u32_at(b, 52) {
            return None;
        }
        Some(Postscript {
            index_off: u64_at(b, 8),
            index_len: u64_at(b, 16),
            file_len: u64_at(b, 24),
            uuid_low: u64_at(b, 32),
            n_chunks: u32_at(b, 40),
            n_trajs: u32_at(b, 44),
            index_crc: u32_at(b, 48),
        })
    }
}
