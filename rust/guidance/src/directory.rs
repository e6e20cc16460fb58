//! The directory of a large chunk: where each site and head of it lies.
use crate::crc::crc32c;
use crate::layout::u32_at;
use crate::schema::{Encoding, Site};

/// Bytes of a directory entry.
pub const ENTRY: usize = 16;

/// How one block of a plane is stored.
pub mod coding {
    /// Nothing is stored; codes of 1 to 4 bits, packed, have the number of bits as their id.
    pub const NONE: u8 = 0;
    /// Scales, one byte each.
    pub const SCALE_RAW: u8 = 1;
    /// Scales, one zstd frame.
    pub const SCALE_ZSTD: u8 = 2;
    /// Low bits of scales: the id is this plus the number of bits.
    pub const SCALE_LOW: u8 = 16;
    /// Codes as RM(1,5) syndromes.
    pub const RM15: u8 = 16;
    /// Directory entry of a plane.
    pub const ENTRY_PLANE: u8 = 0;
    /// Directory entry of a site's per-token encode scales.
    pub const ENTRY_TOKEN_SCALE: u8 = 1;
}

/// Coding of a site's codes and of its uncompressed scales.
pub fn codings(site: &Site) -> [u8; 2] {
    let codes = if site.encoding == Encoding::Rm15 { coding::RM15 } else { site.bits };
    let scales = match site.scale_bits() {
        8 => coding::SCALE_RAW,
        bits => coding::SCALE_LOW + bits,
    };
    [codes, scales]
}

/// Directory entries of a chunk over `sites`.
pub fn entries_of(sites: &[Site]) -> usize {
    sites.iter().map(|s| s.planes as usize + s.per_token() as usize).sum()
}

/// Bytes of a directory of `entries`, its CRC and padding included.
pub fn directory_len(entries: usize) -> usize {
    entries * ENTRY + 8
}

/// One block of a `planes` chunk.
#[derive(Clone, Copy, Debug)]
pub struct PlaneEntry {
    /// Offset in the payload.
    pub off: usize,
    /// Bytes of codes and scales together.
    pub len: usize,
    /// Bytes of the scales at the block's end.
    pub scales_len: usize,
    /// CRC32C of the block.
    pub crc: u32,
    /// Coding of the codes.
    pub codes: u8,
    /// Coding of the scales.
    pub scales: u8,
    /// What the block holds.
    pub kind: u8,
}

/// Parses the directory of a payload of `payload_len` bytes; the error says what is wrong.
pub fn parse_directory(
    dir: &[u8],
    sites: &[Site],
    ntok: usize,
    payload_len: usize,
) -> std::result::Result<Vec<PlaneEntry>, String> {
    let entries = entries_of(sites);
    if dir.len() < directory_len(entries) {
        return Err("plane directory is cut".into());
    }
    if crc32c(&dir[..entries * ENTRY]) != u32_at(dir, entries * ENTRY) {
        return Err("plane directory checksum".into());
    }
    let mut list = Vec::with_capacity(entries);
    let mut off = directory_len(entries);
    let mut i = 0;
    for site in sites {
        for part in 0..site.planes as usize + site.per_token() as usize {
            let b = &dir[i * ENTRY..(i + 1) * ENTRY];
            let e = PlaneEntry {
                off,
                len: u32_at(b, 0) as usize,
                scales_len: u32_at(b, 4) as usize,
                crc: u32_at(b, 8),
                codes: b[12],
                scales: b[13],
                kind: b[14],
            };
            let token_scale = site.per_token() && part == 0;
            let good = if token_scale {
                e.kind == coding::ENTRY_TOKEN_SCALE && e.len == 4 * ntok && e.scales_len == 0
            } else {
                let raw = ntok * site.stored_scale_row();
                let [codes, scales] = codings(site);
                let zstd = e.scales == coding::SCALE_ZSTD && scales == coding::SCALE_RAW && e.scales_len < raw;
                e.kind == coding::ENTRY_PLANE
                    && e.codes == codes
                    && e.len == ntok * (site.stored_code_row() + site.check_row()) + e.scales_len
                    && (zstd || e.scales == scales && e.scales_len == raw)
            };
            if !good {
                return Err(format!("plane directory entry {i} does not fit site '{}'", site.name));
            }
            off += e.len;
            list.push(e);
            i += 1;
        }
    }
    if off != payload_len {
        return Err(format!("planes take {off} bytes of a payload of {payload_len}"));
    }
    Ok(list)
}
