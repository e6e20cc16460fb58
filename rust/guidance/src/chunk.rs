//! A chunk's payload: the rows of a token range and a site range.
//!
//! Two layouts. `whole` (small chunks) is read and checked in one piece. `planes` (large chunks) starts with a
//! directory, so that one site or one head of it is read and checked alone.
use crate::crc::{crc32c, crc32c_append};
use crate::directory::{directory_len, entries_of, parse_directory};
use crate::error::{Error, Result};
use crate::schema::Site;

/// Flag: the payload starts with a plane directory.
pub const FLAG_PLANES: u8 = 1;
/// Flag (`whole` layout): the scales at the end are one zstd frame.
pub const FLAG_ZTAIL: u8 = 2;
/// Chunks above this many bytes get the `planes` layout.
pub const WHOLE_LIMIT: usize = 64 << 10;
/// The codes of some rows, token-major `[ntok, planes, ·]`.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// The site keeps scales only.
    None,
    /// Rows packed by [`pack_row`](crate::pack::pack_row).
    Packed(&'a [u8]),
    /// One byte an element; its low bits count.
    Unpacked(&'a [u8]),
}

/// The rows of one site, token-major.
#[derive(Clone, Copy, Debug)]
pub struct SiteRows<'a> {
    /// Codes `[ntok, planes, ·]`.
    pub codes: Codes<'a>,
    /// Scales `[ntok, planes, scale_row]`.
    pub scales: &'a [u8],
    /// Encode scales, little-endian fp32 `[ntok]`; empty when static.
    pub token_scale: &'a [u8],
}

impl<'a> SiteRows<'a> {
    /// The rows of tokens `[a, b)`, counted from the first row.
    pub fn slice(&self, site: &Site, a: usize, b: usize) -> SiteRows<'a> {
        let planes = site.planes as usize;
        let cut = |s: &'a [u8], row: usize| &s[a * row..b * row];
        SiteRows {
            codes: match self.codes {
                Codes::None => Codes::None,
                Codes::Packed(c) => Codes::Packed(cut(c, planes * site.code_row())),
                Codes::Unpacked(c) => Codes::Unpacked(cut(c, planes * site.width as usize)),
            },
            scales: cut(self.scales, planes * site.scale_row()),
            token_scale: if site.per_token() { cut(self.token_scale, 4) } else { &[] },
        }
    }

    /// Checks every length against the site.
    pub fn check(&self, site: &Site, ntok: usize) -> Result<()> {
        let planes = site.planes as usize;
        let want = |what: &str, got: usize, row: usize| {
            if got == ntok * row {
                return Ok(());
            }
            Err(Error::Usage(format!(
                "site '{}': {what} has {got} bytes, {ntok} tokens of {planes} x {} values need {}",
                site.name,
                site.width,
                ntok * row
            )))
        };
        match self.codes {
            Codes::None if site.bits > 0 => {
                return Err(Error::Usage(format!("site '{}' keeps {} bits: codes are missing", site.name, site.bits)))
            }
            Codes::None => {}
            Codes::Packed(_) | Codes::Unpacked(_) if site.bits == 0 => {
                return Err(Error::Usage(format!("site '{}' keeps scales only (bits = 0): pass no codes", site.name)))
            }
            Codes::Packed(c) => want("packed codes", c.len(), planes * site.code_row())?,
            Codes::Unpacked(c) => want("codes", c.len(), planes * site.width as usize)?,
        }
        want("scales", self.scales.len(), planes * site.scale_row())?;
        if site.per_token() {
            want("token_scale", self.token_scale.len(), 4)
        } else if self.token_scale.is_empty() {
            Ok(())
        } else {
            Err(Error::Usage(format!("site '{}' has a static encode scale: pass no token_scale", site.name)))
        }
    }
}

/// A chunk's payload: bytes of its own, with rows of the caller between them, which are written from where they are.
#[derive(Debug, Default)]
pub struct Payload<'a> {
    /// What the encoder made.
    pub bytes: Vec<u8>,
    /// The caller's rows, each at a position in `bytes`, in order.
    pub rows: Vec<(usize, &'a [u8])>,
}

impl<'a> Payload<'a> {
    /// A payload that makes use of a buffer's memory.
    pub fn in_buffer(mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        Payload { bytes, rows: Vec::new() }
    }

    /// Bytes of it all.
    pub fn len(&self) -> usize {
        self.bytes.len() + self.rows.iter().map(|r| r.1.len()).sum::<usize>()
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces in the order of the file.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let ends = self.rows.iter().map(|r| r.0).chain([self.bytes.len()]);
        let starts = [0].into_iter().chain(self.rows.iter().map(|r| r.0));
        let rows = self.rows.iter().map(|r| r.1).chain([&[][..]]);
        starts.zip(ends).zip(rows).flat_map(|((a, b), rows)| [&self.bytes[a..b], rows]).filter(|p| !p.is_empty())
    }
}

/// The checksum in a chunk's record header. In the `planes` layout it covers directory and padding, and the directory's
/// checksums cover the blocks.
pub fn payload_crc(flags: u8, payload: &[u8], padding: &[u8], sites: &[Site]) -> u32 {
    let covered = if flags & FLAG_PLANES == 0 { payload.len() } else { directory_len(entries_of(sites)) };
    crc32c_append(crc32c(&payload[..covered.min(payload.len())]), padding)
}

/// Checks every byte of a chunk's payload; the error says what fails.
pub fn check_payload(
    flags: u8,
    padded: &[u8],
    len: usize,
    sites: &[Site],
    ntok: usize,
    crc: u32,
) -> std::result::Result<(), String> {
    if payload_crc(flags, &padded[..len], &padded[len..], sites) != crc {
        return Err("payload checksum".into());
    }
    if flags & FLAG_PLANES != 0 {
        for e in parse_directory(&padded[..len], sites, ntok, len)? {
            if crc32c(&padded[e.off..e.off + e.len]) != e.crc {
                return Err("plane checksum".into());
            }
        }
    }
    Ok(())
}
