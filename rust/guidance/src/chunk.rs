//! A chunk's payload: the rows of a token range and a site range.
//!
//! Two layouts. `whole` (small chunks) is read and checked in one piece. `planes` (large chunks) starts with a
//! directory, so that one site or one head of it is read and checked alone.
use crate::coset::{check16, check_rows, to_syndromes};
use crate::crc::{crc32c, crc32c_append};
use crate::error::{Error, Result};
use crate::layout::{put, u32_at};
use crate::pack::pack_row;
use crate::schema::{Encoding, Site};

/// Flag: the payload starts with a plane directory.
pub const FLAG_PLANES: u8 = 1;
/// Flag (`whole` layout): the scales at the end are one zstd frame.
pub const FLAG_ZTAIL: u8 = 2;
/// Chunks above this many bytes get the `planes` layout.
pub const WHOLE_LIMIT: usize = 64 << 10;
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

/// The codes of some rows, token-major `[ntok, planes, ·]`.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// The site keeps scales only.
    None,
    /// Rows packed by [`pack_row`].
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

/// Compression level of scales.
const LEVEL: i32 = -7;

/// Encodes chunks; holds the compressor and its buffers.
pub struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    scales: Vec<u8>,
    plane: Vec<u8>,
}

impl Default for Encoder {
    fn default() -> Self {
        let mut zstd = zstd::bulk::Compressor::new(LEVEL).expect("zstd context");
        // Matches find nothing in scales and all of the gain is Huffman coding: look for matches as little as zstd can,
        // and compress literals, which negative levels would not.
        let huffman = zstd::zstd_safe::CParameter::LiteralCompressionMode(zstd::zstd_safe::ParamSwitch::Enable);
        zstd.set_parameter(huffman).expect("a parameter of zstd");
        Encoder { zstd, scales: Vec::new(), plane: Vec::new() }
    }
}

/// Appends plane `plane` of token-major rows of `row` bytes.
fn gather_plane(src: &[u8], planes: usize, plane: usize, row: usize, out: &mut Vec<u8>) {
    if planes == 1 {
        out.extend_from_slice(src);
    } else {
        for token in src.chunks_exact(planes * row) {
            out.extend_from_slice(&token[plane * row..(plane + 1) * row]);
        }
    }
}

fn push_codes(site: &Site, rows: &SiteRows, plane: usize, ntok: usize, out: &mut Vec<u8>) {
    let (planes, width, row) = (site.planes as usize, site.width as usize, site.code_row());
    match rows.codes {
        Codes::None => {}
        Codes::Packed(c) => gather_plane(c, planes, plane, row, out),
        Codes::Unpacked(c) => {
            let at = out.len();
            out.resize(at + ntok * row, 0);
            if planes == 1 && width % 8 == 0 {
                pack_row(site.bits, c, &mut out[at..]);
                return;
            }
            let source = c.chunks_exact(width).skip(plane).step_by(planes);
            for (src, dst) in source.zip(out[at..].chunks_exact_mut(row)) {
                pack_row(site.bits, src, dst);
            }
        }
    }
}

/// Appends the checks of a plane's rows to `checks`, its scales as stored to `scales`. `codes` are the packed codes
/// that `rm15` checks as well.
fn push_scales(
    site: &Site,
    rows: &SiteRows,
    plane: usize,
    ntok: usize,
    codes: &[u8],
    checks: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) {
    let (planes, blocks) = (site.planes as usize, site.scale_row());
    if site.encoding == Encoding::Lossless {
        return gather_plane(rows.scales, planes, plane, blocks, scales);
    }
    let (stored, bits) = (site.stored_scale_row(), site.scale_bits());
    let at = scales.len();
    scales.resize(at + ntok * stored, 0);
    let source = || rows.scales.chunks_exact(blocks).skip(plane).step_by(planes);
    if planes == 1 && blocks * bits as usize % 8 == 0 {
        pack_row(bits, rows.scales, &mut scales[at..]);
    } else {
        for (src, dst) in source().zip(scales[at..].chunks_exact_mut(stored)) {
            pack_row(bits, src, dst);
        }
    }
    if codes.is_empty() {
        check_rows(source(), checks);
    } else {
        for (src, codes) in source().zip(codes.chunks_exact(site.code_row())) {
            checks.extend_from_slice(&check16(src));
            checks.extend_from_slice(&check16(codes));
        }
    }
}

/// Appends a plane's syndromes to `out`; leaves its packed codes in `packed`.
fn push_syndromes(site: &Site, rows: &SiteRows, plane: usize, ntok: usize, out: &mut Vec<u8>, packed: &mut Vec<u8>) {
    packed.clear();
    push_codes(site, rows, plane, ntok, packed);
    let (row, stored) = (site.code_row(), site.stored_code_row());
    let at = out.len();
    out.resize(at + ntok * stored, 0);
    for (src, dst) in packed.chunks_exact(row).zip(out[at..].chunks_exact_mut(stored)) {
        to_syndromes(src, dst);
    }
}

impl Encoder {
    /// Encodes a chunk's payload into the empty `out` and returns its flags. `rows` were checked and match `sites`.
    pub fn encode<'a>(&mut self, sites: &[Site], rows: &[SiteRows<'a>], ntok: usize, out: &mut Payload<'a>) -> u8 {
        let bytes: usize = sites.iter().map(|s| s.token_bytes() * ntok).sum();
        if bytes > WHOLE_LIMIT {
            self.encode_planes(sites, rows, ntok, out);
            FLAG_PLANES
        } else {
            self.encode_whole(sites, rows, ntok, &mut out.bytes)
        }
    }

    /// [`encode`](Self::encode) in the `whole` layout, whatever the size.
    pub(crate) fn encode_whole(&mut self, sites: &[Site], rows: &[SiteRows], ntok: usize, out: &mut Vec<u8>) -> u8 {
        let mut scales = std::mem::take(&mut self.scales);
        scales.clear();
        for (site, rows) in sites.iter().zip(rows) {
            out.extend_from_slice(rows.token_scale);
            for plane in 0..site.planes as usize {
                self.plane.clear();
                if site.encoding == Encoding::Rm15 {
                    push_syndromes(site, rows, plane, ntok, out, &mut self.plane);
                } else {
                    push_codes(site, rows, plane, ntok, out);
                }
                push_scales(site, rows, plane, ntok, &self.plane, out, &mut scales);
            }
        }
        let whole = sites.iter().all(|s| s.scale_bits() == 8);
        let compressed = whole && self.compress(&scales, out);
        if !compressed {
            out.extend_from_slice(&scales);
        }
        self.scales = scales;
        if compressed {
            FLAG_ZTAIL
        } else {
            0
        }
    }

    fn encode_planes<'a>(&mut self, sites: &[Site], rows: &[SiteRows<'a>], ntok: usize, payload: &mut Payload<'a>) {
        let out = &mut payload.bytes;
        let entries = entries_of(sites);
        out.resize(directory_len(entries), 0);
        let mut scales = std::mem::take(&mut self.scales);
        let mut at = 0;
        let mut entry = |out: &mut Vec<u8>, lent: &[u8], block: usize, scales_len: usize, codings: [u8; 3]| {
            let crc = crc32c_append(crc32c(lent), &out[block..]);
            let len = (lent.len() + out.len() - block) as u32;
            put(out, at, &len.to_le_bytes());
            put(out, at + 4, &(scales_len as u32).to_le_bytes());
            put(out, at + 8, &crc.to_le_bytes());
            put(out, at + 12, &codings);
            at += ENTRY;
        };
        for (site, rows) in sites.iter().zip(rows) {
            if site.per_token() {
                let block = out.len();
                out.extend_from_slice(rows.token_scale);
                entry(out, &[], block, 0, [coding::NONE, coding::NONE, coding::ENTRY_TOKEN_SCALE]);
            }
            for plane in 0..site.planes as usize {
                let block = out.len();
                let mut lent: &'a [u8] = &[];
                self.plane.clear();
                match rows.codes {
                    _ if site.encoding == Encoding::Rm15 => {
                        push_syndromes(site, rows, plane, ntok, out, &mut self.plane);
                    }
                    Codes::Packed(codes) if site.planes == 1 => lent = codes,
                    _ => push_codes(site, rows, plane, ntok, out),
                }
                if !lent.is_empty() {
                    payload.rows.push((block, lent));
                }
                scales.clear();
                push_scales(site, rows, plane, ntok, &self.plane, out, &mut scales);
                let before = out.len();
                let [codes, mut how] = codings(site);
                if how == coding::SCALE_RAW && self.compress(&scales, out) {
                    how = coding::SCALE_ZSTD;
                } else {
                    out.extend_from_slice(&scales);
                }
                let scales_len = out.len() - before;
                entry(out, lent, block, scales_len, [codes, how, coding::ENTRY_PLANE]);
            }
        }
        self.scales = scales;
        let end = entries * ENTRY;
        let crc = crc32c(&out[..end]);
        put(out, end, &crc.to_le_bytes());
    }

    /// Appends `src` as a zstd frame if that is below 0.97 of it.
    fn compress(&mut self, src: &[u8], out: &mut Vec<u8>) -> bool {
        if src.len() < 64 {
            return false;
        }
        let at = out.len();
        out.resize(at + zstd::zstd_safe::compress_bound(src.len()), 0);
        let len = self.zstd.compress_to_buffer(src, &mut out[at..]).expect("the buffer has the bound's size");
        let good = len * 100 < src.len() * 97;
        out.truncate(if good { at + len } else { at });
        good
    }
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
