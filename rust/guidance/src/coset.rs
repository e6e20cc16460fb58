//! Rows that the reader completes with its own activations: low bits of scales, Reed–Muller syndromes, row checks.
//!
//! RM(1,5) is the set of affine functions of 5 bits. The bits of 32 codes are stored up to a codeword: the affine
//! function that agrees with them at positions 0, 1, 2, 4, 8 and 16 is taken off, and the other 26 bits are kept.
use crate::crc::crc32c;
use crate::pack::row_bytes;

/// Codes of a syndrome group.
pub const GROUP: usize = 32;
/// Bits kept of a group.
pub const SYNDROME: usize = 26;

/// Bytes of a row of `width` codes as syndromes.
pub const fn syndrome_row(width: usize) -> usize {
    row_bytes(width.div_ceil(GROUP), SYNDROME)
}

/// The coset member of `c` that is zero at positions 0, 1, 2, 4, 8 and 16.
fn leader(c: u32) -> u32 {
    const AXES: [u32; 5] = [0xaaaa_aaaa, 0xcccc_cccc, 0xf0f0_f0f0, 0xff00_ff00, 0xffff_0000];
    let constant = (c & 1).wrapping_neg();
    let mut out = c ^ constant;
    let rest = out;
    for (i, axis) in AXES.iter().enumerate() {
        out ^= (rest >> (1 << i) & 1).wrapping_neg() & axis;
    }
    out
}

fn squeeze(e: u32) -> u32 {
    (e >> 3 & 1) | (e >> 5 & 7) << 1 | (e >> 9 & 0x7f) << 4 | (e >> 17) << 11
}

fn widen(s: u32) -> u32 {
    (s & 1) << 3 | (s >> 1 & 7) << 5 | (s >> 4 & 0x7f) << 9 | (s >> 11 & 0x7fff) << 17
}

fn word(bytes: &[u8]) -> u32 {
    let mut w = [0u8; 4];
    w[..bytes.len().min(4)].copy_from_slice(&bytes[..bytes.len().min(4)]);
    u32::from_le_bytes(w)
}

/// Packed one-bit codes to syndromes: group `g` holds bits `[26·g, 26·g + 26)` of `dst`.
pub fn to_syndromes(codes: &[u8], dst: &mut [u8]) {
    // Four groups are 16 bytes of codes and 13 of syndromes.
    let mut at = 0;
    for four in codes.chunks(GROUP / 2) {
        let mut acc = 0u128;
        for (k, group) in four.chunks(GROUP / 8).enumerate() {
            let c = match group.try_into() {
                Ok(bytes) => u32::from_le_bytes(bytes),
                Err(_) => word(group),
            };
            acc |= (squeeze(leader(c)) as u128) << (k * SYNDROME);
        }
        let n = (dst.len() - at).min(13);
        dst[at..at + n].copy_from_slice(&acc.to_le_bytes()[..n]);
        at += n;
    }
}

/// Syndromes to packed one-bit coset leaders.
pub fn from_syndromes(src: &[u8], codes: &mut [u8]) {
    let (mut acc, mut have, mut at) = (0u64, 0, 0);
    for group in codes.chunks_mut(GROUP / 8) {
        while have < SYNDROME {
            acc |= (src[at] as u64) << have;
            (have, at) = (have + 8, at + 1);
        }
        let e = widen(acc as u32 & ((1 << SYNDROME) - 1)).to_le_bytes();
        let n = group.len();
        group.copy_from_slice(&e[..n]);
        (acc, have) = (acc >> SYNDROME, have - SYNDROME);
    }
}

/// The row check: the low 16 bits of the bytes' CRC32C.
pub fn check16(bytes: &[u8]) -> [u8; 2] {
    (crc32c(bytes) as u16).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaders_differ_from_their_words_by_an_affine_function_and_are_zero_at_six_places() {
        let mut c = 1u32;
        for _ in 0..1000 {
            c = c.wrapping_mul(1664525).wrapping_add(1013904223);
            let e = leader(c);
            assert_eq!(e & 0x0001_0117, 0);
            assert_eq!(widen(squeeze(e)), e);
            let f = c ^ e;
            let affine = |j: u32| (0..5).fold(f & 1, |acc, i| acc ^ ((j >> i & 1) * ((f >> (1 << i) ^ f) & 1)));
            assert!((0..32).all(|j| f >> j & 1 == affine(j)));
        }
    }

    #[test]
    fn rows_of_every_width_keep_their_cosets() {
        for width in [1usize, 8, 31, 32, 33, 64, 100, 256] {
            let bytes: Vec<u8> = (0..width.div_ceil(8)).map(|i| (i * 37 + 11) as u8).collect();
            let mut stored = vec![0; syndrome_row(width)];
            to_syndromes(&bytes, &mut stored);
            let mut back = vec![0; bytes.len()];
            from_syndromes(&stored, &mut back);
            for (a, b) in bytes.chunks(4).zip(back.chunks(4)) {
                let keep = u32::MAX >> (32 - 8 * a.len());
                assert_eq!(leader(word(a)) & keep, word(b));
            }
        }
    }
}
