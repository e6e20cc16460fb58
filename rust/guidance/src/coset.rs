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

/// Appends [`check16`] of each row. Four rows of one length are summed side by side: one sum alone waits for itself.
pub fn check_rows<'a>(rows: impl Iterator<Item = &'a [u8]>, checks: &mut Vec<u8>) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        let mut rows = rows;
        loop {
            match [rows.next(), rows.next(), rows.next(), rows.next()] {
                [Some(a), Some(b), Some(c), Some(d)] if [b, c, d].iter().all(|r| r.len() == a.len()) => {
                    // SAFETY: the processor was asked.
                    let sums = unsafe { four_sums([a, b, c, d]) };
                    sums.iter().for_each(|sum| checks.extend_from_slice(&(*sum as u16).to_le_bytes()));
                }
                some => {
                    some.iter().flatten().for_each(|row| checks.extend_from_slice(&check16(row)));
                    if some[3].is_none() {
                        return;
                    }
                }
            }
        }
    }
    rows.for_each(|row| checks.extend_from_slice(&check16(row)));
}

/// CRC32C of four rows of one length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn four_sums(rows: [&[u8]; 4]) -> [u32; 4] {
    use std::arch::x86_64::{_mm_crc32_u64, _mm_crc32_u8};
    let n = rows[0].len();
    let [a, b, c, d] = rows.map(|r| r[..n].chunks_exact(8));
    let word = |w: &[u8]| u64::from_le_bytes(w.try_into().expect("eight bytes"));
    let mut s = [u64::from(u32::MAX); 4];
    for (((a, b), c), d) in a.zip(b).zip(c).zip(d) {
        s[0] = _mm_crc32_u64(s[0], word(a));
        s[1] = _mm_crc32_u64(s[1], word(b));
        s[2] = _mm_crc32_u64(s[2], word(c));
        s[3] = _mm_crc32_u64(s[3], word(d));
    }
    let mut sums = s.map(|s| s as u32);
    for (sum, row) in sums.iter_mut().zip(rows) {
        for byte in &row[n / 8 * 8..] {
            *sum = _mm_crc32_u8(*sum, *byte);
        }
    }
    sums.map(|sum| !sum)
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
    fn checks_of_many_rows_are_those_of_each() {
        let bytes: Vec<u8> = (0..4000u32).map(|i| ((i * i) >> 3) as u8).collect();
        for len in [1usize, 7, 8, 36, 128, 333] {
            let (mut got, rows) = (Vec::new(), || bytes.chunks(len)); // the last row may be shorter
            check_rows(rows(), &mut got);
            assert_eq!(got, rows().flat_map(check16).collect::<Vec<u8>>());
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
