//! Reading rows out of a chunk's payload.
use crate::chunk::{FLAG_PLANES, FLAG_ZTAIL};
use crate::coset::from_syndromes;
use crate::crc::{crc32c, crc32c_append};
use crate::directory::{coding, directory_len, entries_of, parse_directory, PlaneEntry};
use crate::error::{Error, Result};
use crate::index::ChunkEntry;
use crate::layout::{padded, RECORD_LEN};
use crate::pack::unpack_row;
use crate::schema::{Encoding, Site};
use crate::source::ReadAt;
use std::path::Path;

/// Where the rows of one site go, token-major; rows are appended at `row`.
#[derive(Debug)]
pub struct Target<'a> {
    /// First and end head that is read.
    pub heads: (usize, usize),
    /// Codes `[rows, heads, ·]`, one byte an element if `unpack`, packed rows otherwise.
    pub codes: Option<&'a mut [u8]>,
    /// Whether codes are unpacked.
    pub unpack: bool,
    /// Scales `[rows, heads, scale_row]`, one byte each, of which only the stored low bits are there.
    pub scales: Option<&'a mut [u8]>,
    /// Row checks `[rows, heads, check_row]`.
    pub checks: Option<&'a mut [u8]>,
    /// Encode scales, little-endian fp32 `[rows]`. A static scale is repeated.
    pub token_scale: Option<&'a mut [u8]>,
    /// Rows already there.
    pub row: usize,
}

/// Reads chunks; holds the decompressor and its buffers.
pub struct Decoder {
    zstd: zstd::bulk::Decompressor<'static>,
    directory: Vec<u8>,
    payload: Vec<u8>,
    scales: Vec<u8>,
}

impl Default for Decoder {
    fn default() -> Self {
        let zstd = zstd::bulk::Decompressor::new().expect("zstd context");
        Decoder { zstd, directory: Vec::new(), payload: Vec::new(), scales: Vec::new() }
    }
}

/// A chunk to read: where it is, what it covers.
pub struct Chunk<'a> {
    /// The segment's bytes.
    pub file: &'a dyn ReadAt,
    /// Its name, for errors.
    pub path: &'a Path,
    /// Where the chunk lies.
    pub entry: ChunkEntry,
    /// The sites it covers.
    pub sites: &'a [Site],
    /// The file in memory, if it is mapped.
    pub map: Option<&'a [u8]>,
}

impl Chunk<'_> {
    fn damaged(&self, what: impl Into<String>) -> Error {
        Error::corrupt(self.path, self.entry.off, what)
    }

    /// `len` bytes of the payload from `at` on: in the map, or read into `buffer`.
    fn bytes<'b>(&'b self, buffer: &'b mut Vec<u8>, at: usize, len: usize) -> Result<&'b [u8]> {
        if let Some(map) = self.map {
            let from = self.entry.off as usize + RECORD_LEN + at;
            return map.get(from..from + len).ok_or_else(|| self.damaged("the file ends inside this chunk"));
        }
        let buffer = grown(buffer, len);
        self.read(buffer, at as u64)?;
        Ok(buffer)
    }

    fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        self.file.read_exact_at(buf, self.entry.off + RECORD_LEN as u64 + at).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => self.damaged("the file ends inside this chunk"),
            _ => Error::io(self.path, "read", e),
        })
    }
}

/// The first `len` bytes of a buffer that only grows.
fn grown(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// Reads and checks one block of a `planes` chunk.
fn block<'a>(buffer: &'a mut Vec<u8>, chunk: &'a Chunk, p: &PlaneEntry) -> Result<&'a [u8]> {
    let block = chunk.bytes(buffer, p.off, p.len)?;
    if crc32c(block) != p.crc {
        return Err(chunk.damaged("plane checksum"));
    }
    Ok(block)
}

/// The heads that are asked for and that the site's rows hold.
fn stored_heads(site: &Site, out: &Target) -> std::ops::Range<usize> {
    let first = site.first_plane as usize;
    out.heads.0.max(first)..out.heads.1.min(first + site.planes as usize)
}

fn copy_codes(site: &Site, src: &[u8], plane: usize, rows: usize, out: &mut Target) {
    let heads = out.heads.1 - out.heads.0;
    let (head, first) = (plane - out.heads.0, out.row);
    let row = site.stored_code_row();
    let unpack = out.unpack;
    let width = if unpack { site.width as usize } else { site.code_row() };
    let Some(dst) = out.codes.as_deref_mut() else {
        return;
    };
    let dst = &mut dst[first * heads * width..(first + rows) * heads * width];
    if site.encoding == Encoding::Rm15 {
        let mut codes = vec![0u8; site.code_row()];
        for (src, dst) in src.chunks_exact(row).zip(dst.chunks_exact_mut(width).skip(head).step_by(heads)) {
            from_syndromes(src, &mut codes);
            if unpack {
                unpack_row(1, &codes, dst);
            } else {
                dst.copy_from_slice(&codes);
            }
        }
        return;
    }
    if heads == 1 && (!unpack || width % 8 == 0) {
        if unpack {
            unpack_row(site.bits, src, dst);
        } else {
            dst.copy_from_slice(src);
        }
        return;
    }
    for (src, dst) in src.chunks_exact(row).zip(dst.chunks_exact_mut(width).skip(head).step_by(heads)) {
        if unpack {
            unpack_row(site.bits, src, dst);
        } else {
            dst.copy_from_slice(src);
        }
    }
}

fn copy_scales(site: &Site, src: &[u8], plane: usize, rows: usize, out: &mut Target) {
    let heads = out.heads.1 - out.heads.0;
    let (head, first, row, bits) = (plane - out.heads.0, out.row, site.scale_row(), site.scale_bits());
    let Some(dst) = out.scales.as_deref_mut() else {
        return;
    };
    let dst = &mut dst[first * heads * row..(first + rows) * heads * row];
    if bits < 8 && heads == 1 && row * bits as usize % 8 == 0 {
        return unpack_row(bits, src, dst);
    }
    if bits < 8 {
        let stored = src.chunks_exact(site.stored_scale_row());
        for (src, dst) in stored.zip(dst.chunks_exact_mut(row).skip(head).step_by(heads)) {
            unpack_row(bits, src, dst);
        }
        return;
    }
    if heads == 1 {
        return dst.copy_from_slice(src);
    }
    for (src, dst) in src.chunks_exact(row).zip(dst.chunks_exact_mut(row).skip(head).step_by(heads)) {
        dst.copy_from_slice(src);
    }
}

fn copy_checks(site: &Site, src: &[u8], plane: usize, rows: usize, out: &mut Target) {
    let heads = out.heads.1 - out.heads.0;
    let (head, first, row) = (plane - out.heads.0, out.row, site.check_row());
    let Some(dst) = out.checks.as_deref_mut().filter(|_| row > 0) else { return };
    let dst = &mut dst[first * heads * row..(first + rows) * heads * row];
    if heads == 1 {
        return dst.copy_from_slice(src);
    }
    for (src, dst) in src.chunks_exact(row).zip(dst.chunks_exact_mut(row).skip(head).step_by(heads)) {
        dst.copy_from_slice(src);
    }
}

fn copy_token_scale(site: &Site, src: &[u8], rows: usize, out: &mut Target) {
    let first = out.row;
    let Some(dst) = out.token_scale.as_deref_mut() else {
        return;
    };
    let dst = &mut dst[first * 4..(first + rows) * 4];
    match site.global_scale {
        crate::schema::GlobalScale::PerToken => dst.copy_from_slice(src),
        crate::schema::GlobalScale::Static(bits) => {
            dst.chunks_exact_mut(4).for_each(|d| d.copy_from_slice(&bits.to_le_bytes()));
        }
    }
}

impl Decoder {
    /// Copies tokens `[a, b)` (counted from the chunk's first) of the wanted sites.
    ///
    /// `wants` pairs a site's position in `chunk.sites` with the target that its rows are written to; the targets'
    /// `row` is not advanced.
    pub fn read(
        &mut self,
        chunk: &Chunk,
        a: usize,
        b: usize,
        wants: &[(usize, usize)],
        targets: &mut [Target],
    ) -> Result<()> {
        if chunk.entry.flags & FLAG_PLANES != 0 {
            self.read_planes(chunk, a, b, wants, targets)
        } else {
            self.read_whole(chunk, a, b, wants, targets)
        }
    }

    fn read_whole(
        &mut self,
        chunk: &Chunk,
        a: usize,
        b: usize,
        wants: &[(usize, usize)],
        targets: &mut [Target],
    ) -> Result<()> {
        let (e, ntok) = (&chunk.entry, chunk.entry.ntok as usize);
        let whole = chunk.bytes(&mut self.payload, 0, padded(e.len as usize))?;
        if crc32c(whole) != e.crc {
            return Err(chunk.damaged("payload checksum"));
        }
        let payload = &whole[..e.len as usize];
        let fixed = |s: &Site| {
            let row = s.stored_code_row() + s.check_row();
            ntok * (s.planes as usize * row + if s.per_token() { 4 } else { 0 })
        };
        let head: usize = chunk.sites.iter().map(fixed).sum();
        let raw: usize = chunk.sites.iter().map(|s| ntok * s.planes as usize * s.stored_scale_row()).sum();
        let tail = payload.get(head..).ok_or_else(|| chunk.damaged("payload is too short"))?;
        let scales: &[u8] = if e.flags & FLAG_ZTAIL != 0 {
            let scales = grown(&mut self.scales, raw);
            match self.zstd.decompress_to_buffer(tail, &mut *scales) {
                Ok(n) if n == raw => scales,
                _ => return Err(chunk.damaged("scales do not decompress to their size")),
            }
        } else if tail.len() == raw {
            tail
        } else {
            return Err(chunk.damaged(format!("payload has {} bytes, {} expected", payload.len(), head + raw)));
        };
        let (mut at, mut scale_at, mut next) = (0, 0, 0);
        for &(site_i, target) in wants {
            for s in &chunk.sites[next..site_i] {
                at += fixed(s);
                scale_at += ntok * s.planes as usize * s.stored_scale_row();
            }
            next = site_i;
            let site = &chunk.sites[site_i];
            let (code_row, check_row) = (site.stored_code_row(), site.check_row());
            let scale_row = site.stored_scale_row();
            let ts = if site.per_token() { 4 * ntok } else { 0 };
            let out = &mut targets[target];
            copy_token_scale(site, if ts > 0 { &payload[at + 4 * a..at + 4 * b] } else { &[] }, b - a, out);
            for plane in stored_heads(site, out) {
                let local = plane - site.first_plane as usize;
                let block = &payload[at + ts + local * ntok * (code_row + check_row)..];
                copy_codes(site, &block[a * code_row..b * code_row], plane, b - a, out);
                let checks = &block[ntok * code_row..][a * check_row..b * check_row];
                copy_checks(site, checks, plane, b - a, out);
                let rows = &scales[scale_at + local * ntok * scale_row..][a * scale_row..b * scale_row];
                copy_scales(site, rows, plane, b - a, out);
            }
        }
        Ok(())
    }

    fn read_planes(
        &mut self,
        chunk: &Chunk,
        a: usize,
        b: usize,
        wants: &[(usize, usize)],
        targets: &mut [Target],
    ) -> Result<()> {
        let (e, ntok) = (&chunk.entry, chunk.entry.ntok as usize);
        let payload_len = e.len as usize;
        let dir_len = directory_len(entries_of(chunk.sites));
        if dir_len > payload_len {
            return Err(chunk.damaged("plane directory is longer than its chunk"));
        }
        let dir = chunk.bytes(&mut self.directory, 0, dir_len)?;
        let planes = parse_directory(dir, chunk.sites, ntok, payload_len).map_err(|w| chunk.damaged(w))?;
        let (mut first, mut next) = (0, 0);
        for &(site_i, target) in wants {
            first += entries_of(&chunk.sites[next..site_i]);
            next = site_i;
            let site = &chunk.sites[site_i];
            let out = &mut targets[target];
            let ts = site.per_token() as usize;
            if ts > 0 && out.token_scale.is_some() {
                let block = block(&mut self.payload, chunk, &planes[first])?;
                copy_token_scale(site, &block[4 * a..4 * b], b - a, out);
            } else {
                copy_token_scale(site, &[], if ts > 0 { 0 } else { b - a }, out);
            }
            let (code_row, check_row) = (site.stored_code_row(), site.check_row());
            let scale_row = site.stored_scale_row();
            for plane in stored_heads(site, out) {
                let p = planes[first + ts + plane - site.first_plane as usize];
                let direct = (a, b) == (0, ntok)
                    && out.heads.1 - out.heads.0 == 1
                    && !out.unpack
                    && site.encoding != Encoding::Rm15
                    && out.codes.is_some()
                    && chunk.map.is_none();
                let rest = if direct {
                    // A whole plane of packed codes is read to where it is wanted.
                    let at = out.row * code_row;
                    let codes = &mut out.codes.as_deref_mut().expect("checked")[at..at + ntok * code_row];
                    chunk.read(codes, p.off as u64)?;
                    let rest = grown(&mut self.payload, p.len - codes.len());
                    chunk.read(rest, (p.off + codes.len()) as u64)?;
                    if crc32c_append(crc32c(codes), rest) != p.crc {
                        return Err(chunk.damaged("plane checksum"));
                    }
                    &*rest
                } else {
                    let block = block(&mut self.payload, chunk, &p)?;
                    copy_codes(site, &block[a * code_row..b * code_row], plane, b - a, out);
                    &block[ntok * code_row..]
                };
                let (checks, stored) = rest.split_at(rest.len() - p.scales_len);
                copy_checks(site, &checks[a * check_row..b * check_row], plane, b - a, out);
                if out.scales.is_none() {
                    continue;
                }
                let scales: &[u8] = if p.scales == coding::SCALE_ZSTD {
                    let raw = ntok * scale_row;
                    let scales = grown(&mut self.scales, raw);
                    match self.zstd.decompress_to_buffer(stored, &mut *scales) {
                        Ok(n) if n == raw => scales,
                        _ => return Err(chunk.damaged("scales do not decompress to their size")),
                    }
                } else {
                    stored
                };
                copy_scales(site, &scales[a * scale_row..b * scale_row], plane, b - a, out);
            }
        }
        Ok(())
    }
}
