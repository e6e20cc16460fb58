//! The binary index of a segment: chunk table, trajectory table, order by id, strings.
use crate::error::{Error, Result};
use crate::layout::{i64_at, padded, put, u16_at, u32_at, u64_at, RecordHeader, RECORD_LEN};
use crate::traj::{Status, Traj};
use std::path::Path;

/// Bytes of a chunk entry.
pub const CHUNK_ENTRY: usize = 48;
/// Bytes of a trajectory entry.
pub const TRAJ_ENTRY: usize = 64;

/// Where a chunk lies and what it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEntry {
    /// Trajectory number.
    pub traj: u32,
    /// First site.
    pub site0: u16,
    /// Number of sites.
    pub nsites: u16,
    /// First token.
    pub tok0: u32,
    /// Number of tokens.
    pub ntok: u32,
    /// Offset of the record header.
    pub off: u64,
    /// Bytes of the payload, padding not counted.
    pub len: u32,
    /// Record type.
    pub kind: u8,
    /// Layout flags.
    pub flags: u8,
    /// CRC32C of payload and padding.
    pub crc: u32,
    /// CRC32C of the token ids.
    pub token_crc: u32,
    /// Record number.
    pub seq: u64,
}

impl ChunkEntry {
    /// The entry of the record with header `h` at `off`.
    pub fn new(h: &RecordHeader, off: u64) -> Self {
        ChunkEntry {
            traj: h.traj,
            site0: h.site0,
            nsites: h.nsites,
            tok0: h.tok0,
            ntok: h.ntok,
            off,
            len: h.len as u32,
            kind: h.kind,
            flags: h.flags,
            crc: h.payload_crc,
            token_crc: h.token_crc,
            seq: h.seq,
        }
    }

    /// End of its tokens.
    pub fn end(&self) -> u64 {
        self.tok0 as u64 + self.ntok as u64
    }

    fn encode(&self, b: &mut [u8]) {
        put(b, 0, &self.traj.to_le_bytes());
        put(b, 4, &self.site0.to_le_bytes());
        put(b, 6, &self.nsites.to_le_bytes());
        put(b, 8, &self.tok0.to_le_bytes());
        put(b, 12, &self.ntok.to_le_bytes());
        put(b, 16, &self.off.to_le_bytes());
        put(b, 24, &self.len.to_le_bytes());
        b[28] = self.kind;
        b[29] = self.flags;
        put(b, 32, &self.crc.to_le_bytes());
        put(b, 36, &self.token_crc.to_le_bytes());
        put(b, 40, &self.seq.to_le_bytes());
    }

    fn decode(b: &[u8]) -> Self {
        ChunkEntry {
            traj: u32_at(b, 0),
            site0: u16_at(b, 4),
            nsites: u16_at(b, 6),
            tok0: u32_at(b, 8),
            ntok: u32_at(b, 12),
            off: u64_at(b, 16),
            len: u32_at(b, 24),
            kind: b[28],
            flags: b[29],
            crc: u32_at(b, 32),
            token_crc: u32_at(b, 36),
            seq: u64_at(b, 40),
        }
    }
}

/// Collects what a segment holds, while it is written or scanned.
#[derive(Default)]
pub struct IndexBuilder {
    chunks: Vec<ChunkEntry>,
    trajs: Vec<Traj>,
}

impl IndexBuilder {
    /// A chunk; it counts once its trajectory is committed.
    pub fn chunk(&mut self, entry: ChunkEntry) {
        self.chunks.push(entry);
    }

    /// A commit.
    pub fn commit(&mut self, traj: Traj) {
        self.trajs.push(traj);
    }

    /// Committed trajectories so far.
    pub fn committed(&self) -> usize {
        self.trajs.len()
    }

    /// The index of everything committed.
    pub fn build(mut self) -> Index {
        self.trajs.sort_by_key(|t| t.number);
        self.trajs.dedup_by_key(|t| t.number);
        self.chunks.sort_by_key(|c| (c.traj, c.kind, c.site0, c.tok0));
        let mut order: Vec<u32> = (0..self.trajs.len() as u32).collect();
        order.sort_by(|a, b| self.trajs[*a as usize].id.cmp(&self.trajs[*b as usize].id));
        let mut chunk_bytes = Vec::with_capacity(self.chunks.len() * CHUNK_ENTRY);
        let mut traj_bytes = Vec::with_capacity(self.trajs.len() * TRAJ_ENTRY);
        let mut heap = Vec::new();
        let (mut n_chunks, mut at) = (0u32, 0);
        for t in &self.trajs {
            while at < self.chunks.len() && self.chunks[at].traj < t.number {
                at += 1;
            }
            let first = n_chunks;
            while at < self.chunks.len() && self.chunks[at].traj == t.number {
                let b = chunk_bytes.len();
                chunk_bytes.resize(b + CHUNK_ENTRY, 0);
                self.chunks[at].encode(&mut chunk_bytes[b..]);
                n_chunks += 1;
                at += 1;
            }
            let mut b = [0u8; TRAJ_ENTRY];
            put(&mut b, 0, &t.number.to_le_bytes());
            put(&mut b, 4, &t.n_tokens.to_le_bytes());
            put(&mut b, 8, &t.n_ids.to_le_bytes());
            put(&mut b, 12, &t.first.to_le_bytes());
            put(&mut b, 16, &first.to_le_bytes());
            put(&mut b, 20, &(n_chunks - first).to_le_bytes());
            put(&mut b, 24, &t.policy_min.to_le_bytes());
            put(&mut b, 32, &t.policy_max.to_le_bytes());
            put(&mut b, 40, &(heap.len() as u64).to_le_bytes());
            put(&mut b, 48, &(t.extra.len() as u32).to_le_bytes());
            b[52] = t.id.len() as u8;
            b[53] = t.prefix.len() as u8;
            b[54] = t.status as u8;
            put(&mut b, 56, &t.part.to_le_bytes());
            put(&mut b, 58, &t.parts.to_le_bytes());
            traj_bytes.extend_from_slice(&b);
            heap.extend_from_slice(t.id.as_bytes());
            heap.extend_from_slice(t.prefix.as_bytes());
            heap.extend_from_slice(&t.extra);
        }
        let mut bytes = chunk_bytes;
        bytes.extend_from_slice(&traj_bytes);
        order.iter().for_each(|i| bytes.extend_from_slice(&i.to_le_bytes()));
        bytes.extend_from_slice(&heap);
        bytes.resize(padded(bytes.len()), 0);
        Index { bytes, n_chunks: n_chunks as usize, n_trajs: self.trajs.len() }
    }
}

/// A segment's index, read in place.
#[derive(Debug, Default)]
pub struct Index {
    bytes: Vec<u8>,
    n_chunks: usize,
    n_trajs: usize,
}

/// The chunks of a trajectory in the chunk table.
#[derive(Clone, Copy, Debug)]
pub struct ChunkRange {
    /// First entry.
    pub first: usize,
    /// Number of entries.
    pub len: usize,
}

impl Index {
    /// Wraps the bytes of an index whose checksum was checked.
    pub fn from_bytes(bytes: Vec<u8>, n_chunks: usize, n_trajs: usize, path: &Path) -> Result<Self> {
        let need = n_chunks as u64 * CHUNK_ENTRY as u64 + n_trajs as u64 * (TRAJ_ENTRY as u64 + 4);
        if (bytes.len() as u64) < need {
            return Err(Error::corrupt(path, 0, format!("index of {} bytes for {n_chunks} chunks", bytes.len())));
        }
        Ok(Index { bytes, n_chunks, n_trajs })
    }

    /// The bytes on disk.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Entries of the chunk table.
    pub fn n_chunks(&self) -> usize {
        self.n_chunks
    }

    /// Committed trajectories.
    pub fn n_trajs(&self) -> usize {
        self.n_trajs
    }

    /// Chunk entry `i`.
    pub fn chunk(&self, i: usize) -> ChunkEntry {
        ChunkEntry::decode(&self.bytes[i * CHUNK_ENTRY..(i + 1) * CHUNK_ENTRY])
    }

    fn traj_bytes(&self, i: usize) -> &[u8] {
        &self.bytes[self.n_chunks * CHUNK_ENTRY + i * TRAJ_ENTRY..][..TRAJ_ENTRY]
    }

    fn text(&self, i: usize) -> &[u8] {
        let b = self.traj_bytes(i);
        let heap = self.n_chunks * CHUNK_ENTRY + self.n_trajs * (TRAJ_ENTRY + 4);
        let len = b[52] as usize + b[53] as usize + u32_at(b, 48) as usize;
        usize::try_from(u64_at(b, 40))
            .ok()
            .and_then(|off| self.bytes.get(heap..)?.get(off..)?.get(..len))
            .unwrap_or_default()
    }

    /// The id of trajectory `i`, as bytes.
    pub fn id(&self, i: usize) -> &[u8] {
        let text = self.text(i);
        &text[..text.len().min(self.traj_bytes(i)[52] as usize)]
    }

    /// Trajectory entry `i` with its chunks; `None` if the entry is nonsense.
    pub fn traj(&self, i: usize) -> Option<(Traj, ChunkRange)> {
        let (b, text) = (self.traj_bytes(i), self.text(i));
        let (id, prefix) = (b[52] as usize, b[53] as usize);
        let range = ChunkRange { first: u32_at(b, 16) as usize, len: u32_at(b, 20) as usize };
        if text.len() < id + prefix || range.first + range.len > self.n_chunks {
            return None;
        }
        let traj = Traj {
            number: u32_at(b, 0),
            n_tokens: u32_at(b, 4),
            n_ids: u32_at(b, 8),
            first: u32_at(b, 12),
            n_chunks: range.len as u32,
            policy_min: i64_at(b, 24),
            policy_max: i64_at(b, 32),
            status: Status::from_byte(b[54])?,
            part: u16_at(b, 56),
            parts: u16_at(b, 58),
            id: std::str::from_utf8(&text[..id]).ok()?.to_owned(),
            prefix: std::str::from_utf8(&text[id..id + prefix]).ok()?.to_owned(),
            extra: text[id + prefix..].to_vec(),
        };
        Some((traj, range))
    }

    /// Parts of trajectory `i`: 1 if one writer wrote all of it.
    pub fn parts(&self, i: usize) -> u16 {
        u16_at(self.traj_bytes(i), 58)
    }

    /// The committed trajectory of that id.
    pub fn find(&self, id: &str) -> Option<usize> {
        let at = self.n_chunks * CHUNK_ENTRY + self.n_trajs * TRAJ_ENTRY;
        let order = |k: usize| (u32_at(&self.bytes, at + 4 * k) as usize).min(self.n_trajs - 1);
        let (mut lo, mut hi) = (0, self.n_trajs);
        while lo < hi {
            let mid = (lo + hi) / 2;
            if self.id(order(mid)) <= id.as_bytes() {
                lo = mid + 1;
            } else {
                hi = mid;
            }
        }
        let is_id = |k: usize| self.id(order(k)) == id.as_bytes();
        // A writer never commits an id twice: an index that says so is forged, and neither entry is trusted.
        (lo > 0 && is_id(lo - 1) && !(lo > 1 && is_id(lo - 2))).then(|| order(lo - 1))
    }

    /// First entry of `range` whose key is not before `(site0, token)`: entries are sorted by kind, site, token.
    pub fn partition(&self, range: ChunkRange, before: impl Fn(&ChunkEntry) -> bool) -> usize {
        let (mut lo, mut hi) = (range.first, range.first + range.len);
        while lo < hi {
            let mid = (lo + hi) / 2;
            if before(&self.chunk(mid)) {
                lo = mid + 1;
            } else {
                hi = mid;
            }
        }
        lo
    }
}

/// Where a record's payload starts.
pub fn payload_at(off: u64) -> u64 {
    off + RECORD_LEN as u64
}
