//! Walking a segment's records without its index.
use crate::chunk::check_payload;
use crate::crc::crc32c;
use crate::error::{Error, Result};
use crate::index::{ChunkEntry, IndexBuilder};
use crate::layout::{kind, FileHeader, RecordHeader, ALIGN, MAX_PAYLOAD, RECORD_LEN, RECORD_MAGIC};
use crate::schema::Site;
use crate::traj::Traj;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A range of bytes that fails its checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// First byte.
    pub offset: u64,
    /// End.
    pub end: u64,
    /// What fails.
    pub what: String,
    /// Whether it reaches the end of an unsealed file, as after a killed writer.
    pub torn_tail: bool,
}

/// The result of a walk.
#[derive(Debug, Default)]
pub struct Scan {
    /// Everything valid that was found.
    pub builder: IndexBuilder,
    /// What failed.
    pub damage: Vec<Damage>,
    /// Valid records.
    pub records: u64,
    /// End of the last valid record.
    pub valid_end: u64,
}

impl std::fmt::Debug for IndexBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IndexBuilder({} committed)", self.committed())
    }
}

/// What a segment's records look like to a walk.
pub struct Bounds<'a> {
    /// The file.
    pub file: &'a File,
    /// Its name.
    pub path: &'a Path,
    /// Its header.
    pub header: &'a FileHeader,
    /// Sites of its schema.
    pub sites: &'a [Site],
    /// Where the records end: the index, or the end of the file.
    pub end: u64,
    /// Whether the file is sealed, so that every byte must be valid.
    pub sealed: bool,
}

impl Bounds<'_> {
    fn header_at(&self, off: u64, min_seq: u64) -> Result<Option<RecordHeader>> {
        if off + RECORD_LEN as u64 > self.end {
            return Ok(None);
        }
        let mut b = [0u8; RECORD_LEN];
        self.read(&mut b, off)?;
        Ok(RecordHeader::decode(&b).filter(|h| self.fits(h, off, min_seq)))
    }

    fn fits(&self, h: &RecordHeader, off: u64, min_seq: u64) -> bool {
        h.uuid_low == self.header.uuid_low()
            && h.seq >= min_seq
            && h.len <= MAX_PAYLOAD
            && h.padded_len() <= self.end - off - RECORD_LEN as u64
    }

    fn read(&self, buf: &mut [u8], off: u64) -> Result<()> {
        self.file.read_exact_at(buf, off).map_err(|e| Error::io(self.path, "read", e))
    }

    /// The next offset at or after `from` where a valid header stands.
    fn resync(&self, from: u64, min_seq: u64) -> Result<Option<u64>> {
        const WINDOW: u64 = 1 << 20;
        let mut buf = Vec::new();
        let mut at = from.div_ceil(ALIGN as u64) * ALIGN as u64;
        while at + RECORD_LEN as u64 <= self.end {
            let len = WINDOW.min(self.end - at) as usize;
            buf.resize(len, 0);
            self.read(&mut buf, at)?;
            for i in (0..=len - RECORD_LEN).step_by(ALIGN) {
                if buf[i..i + 4] == RECORD_MAGIC
                    && RecordHeader::decode(&buf[i..]).is_some_and(|h| self.fits(&h, at + i as u64, min_seq))
                {
                    return Ok(Some(at + i as u64));
                }
            }
            if at + len as u64 == self.end {
                break;
            }
            at += (len - RECORD_LEN) as u64 / ALIGN as u64 * ALIGN as u64;
        }
        Ok(None)
    }

    /// Walks all records, checking every byte of them, and collects what is valid.
    pub fn scan(&self) -> Result<Scan> {
        let mut out = Scan { valid_end: self.header.first_record(), ..Scan::default() };
        let (mut off, mut seq) = (out.valid_end, 0u64);
        let mut payload = Vec::new();
        while off < self.end {
            let header = self.header_at(off, seq)?;
            let whole = header.filter(|h| h.seq == seq || out.damage.last().is_some_and(|d| d.end == off));
            let Some(h) = whole else {
                let next = self.resync(off + 1, seq)?;
                let end = next.unwrap_or(self.end);
                let torn_tail = next.is_none() && !self.sealed;
                let what = if header.is_some() { "records are missing before this one" } else { "record header" };
                if header.is_some() {
                    out.damage.push(Damage { offset: off, end: off, what: what.into(), torn_tail: false });
                    continue;
                }
                out.damage.push(Damage { offset: off, end, what: what.into(), torn_tail });
                off = end;
                continue;
            };
            seq = h.seq + 1;
            let end = off + RECORD_LEN as u64 + h.padded_len();
            payload.resize(h.padded_len() as usize, 0);
            self.read(&mut payload, off + RECORD_LEN as u64)?;
            if let Err(what) = self.collect(&h, off, &payload, &mut out.builder) {
                let torn_tail = end == self.end && !self.sealed;
                out.damage.push(Damage { offset: off, end, what, torn_tail });
            } else {
                out.records += 1;
                out.valid_end = end;
            }
            off = end;
        }
        Ok(out)
    }

    /// Checks a payload and notes what the record says.
    fn collect(
        &self,
        h: &RecordHeader,
        off: u64,
        padded: &[u8],
        builder: &mut IndexBuilder,
    ) -> std::result::Result<(), String> {
        let len = h.len as usize;
        if h.kind != kind::CHUNK {
            if crc32c(padded) != h.payload_crc {
                return Err("payload checksum".into());
            }
            match h.kind {
                kind::AUDIT => builder.chunk(ChunkEntry::new(h, off)),
                kind::TRAJ => {
                    let traj = Traj::decode(h.traj, &padded[..len]);
                    builder.commit(traj.ok_or("commit record does not parse")?);
                }
                _ => {}
            }
            return Ok(());
        }
        let (a, n) = (h.site0 as usize, h.nsites as usize);
        let sites = self.sites.get(a..a + n).filter(|s| !s.is_empty() && h.ntok > 0);
        let sites = sites.ok_or("chunk covers sites that the schema lacks")?;
        check_payload(h.flags, padded, len, sites, h.ntok as usize, h.payload_crc)?;
        builder.chunk(ChunkEntry::new(h, off));
        Ok(())
    }
}
