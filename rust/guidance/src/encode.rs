//! From rows to a chunk's payload.
use crate::chunk::{Codes, Payload, SiteRows, FLAG_PLANES, FLAG_ZTAIL, WHOLE_LIMIT};
use crate::coset::{check16, check_rows, to_syndromes};
use crate::crc::{crc32c, crc32c_append};
use crate::directory::{coding, codings, directory_len, entries_of, ENTRY};
use crate::huffman::Huffman;
use crate::layout::put;
use crate::pack::pack_row;
use crate::schema::{Encoding, Site};

/// Compression level of scales.
const LEVEL: i32 = -7;

/// Encodes chunks; holds the compressor and its buffers.
pub struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    huffman: Huffman,
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
        Encoder { zstd, huffman: Huffman::default(), scales: Vec::new(), plane: Vec::new() }
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
                let stored = if site.planes == 1 && site.encoding == Encoding::Lossless {
                    rows.scales
                } else {
                    scales.clear();
                    push_scales(site, rows, plane, ntok, &self.plane, out, &mut scales);
                    &scales
                };
                let before = out.len();
                let [codes, mut how] = codings(site);
                if how == coding::SCALE_RAW && self.compress(stored, out) {
                    how = coding::SCALE_ZSTD;
                } else {
                    out.extend_from_slice(stored);
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
        if self.huffman.frame(src, out) {
            return true;
        }
        let at = out.len();
        out.resize(at + zstd::zstd_safe::compress_bound(src.len()), 0);
        let len = self.zstd.compress_to_buffer(src, &mut out[at..]).expect("the buffer has the bound's size");
        let good = len * 100 < src.len() * 97;
        out.truncate(if good { at + len } else { at });
        good
    }
}
