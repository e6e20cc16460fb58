//! Bit packing: element `j` of a row holds bits `[b·j, b·j + b)`, least significant first; rows are padded to a byte.

const fn repeat(bits: u32, every: u32) -> u64 {
    let mut mask = 0u64;
    let mut at = 0;
    while at < 64 {
        mask |= ((1u64 << bits) - 1) << at;
        at += every;
    }
    mask
}

/// Bytes of a packed row of `width` elements of `bits` each.
pub const fn row_bytes(width: usize, bits: usize) -> usize {
    (width * bits).div_ceil(8)
}

#[inline(always)]
fn gather<const B: u32>(x: u64) -> u64 {
    let s = 8 - B;
    let x = x & const { repeat(B, 8) };
    let x = (x | x >> s) & const { repeat(2 * B, 16) };
    let x = (x | x >> (2 * s)) & const { repeat(4 * B, 32) };
    (x | x >> (4 * s)) & const { (1u64 << (8 * B)) - 1 }
}

#[inline(always)]
fn spread<const B: u32>(x: u64) -> u64 {
    let s = 8 - B;
    let x = (x | x << (4 * s)) & const { repeat(4 * B, 32) };
    let x = (x | x << (2 * s)) & const { repeat(2 * B, 16) };
    (x | x << s) & const { repeat(B, 8) }
}

/// Packs 32 elements at a time; returns how many, a multiple of 8.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn pack_wide<const B: u32>(src: &[u8], dst: &mut [u8]) -> usize {
    use std::arch::x86_64::*;
    let (step, low) = (B as i32, _mm256_set1_epi8((1i8 << B) - 1));
    // Neighbours are joined by a multiplication and an addition: 8-bit fields to 16, to 32, then by shifts to 64.
    let pairs = _mm256_set1_epi16((1i16 << (8 + B)) | 1);
    let fours = _mm256_set1_epi32((1i32 << (16 + 2 * B)) | 1);
    let half = _mm256_set1_epi64x((1i64 << (4 * B)) - 1);
    let shift = _mm_cvtsi32_si128(32 - 4 * step);
    // The first B bytes of both 64-bit halves, one after the other.
    let mut order = [-1i8; 16];
    for i in 0..B as usize {
        (order[i], order[B as usize + i]) = (i as i8, 8 + i as i8);
    }
    // SAFETY: 16 readable bytes.
    let order = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(order.as_ptr().cast()) });
    let (mut at, mut n) = (0, 0);
    let out = 2 * B as usize;
    while n + 32 <= src.len() && at + out + 8 <= dst.len() {
        // SAFETY: 32 bytes were just found to be there.
        let x = _mm256_and_si256(unsafe { _mm256_loadu_si256(src[n..n + 32].as_ptr().cast()) }, low);
        let x = _mm256_madd_epi16(_mm256_maddubs_epi16(x, pairs), fours);
        let x = _mm256_or_si256(_mm256_and_si256(x, half), _mm256_andnot_si256(half, _mm256_srl_epi64(x, shift)));
        let x = _mm256_shuffle_epi8(x, order);
        // What a store writes too much, the next one overwrites.
        dst[at..at + 8].copy_from_slice(&_mm256_extract_epi64::<0>(x).to_le_bytes());
        dst[at + out..at + out + 8].copy_from_slice(&_mm256_extract_epi64::<2>(x).to_le_bytes());
        (at, n) = (at + 2 * out, n + 32);
    }
    n
}

fn pack<const B: u32>(src: &[u8], dst: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if B < 4 && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor was asked.
        let n = unsafe { pack_wide::<B>(src, dst) };
        return pack_words::<B>(&src[n..], &mut dst[n / 8 * B as usize..]);
    }
    pack_words::<B>(src, dst)
}

fn pack_words<const B: u32>(src: &[u8], dst: &mut [u8]) {
    let step = B as usize;
    let mut at = 0;
    // Whole words are stored; what they write too much, the next one overwrites.
    let wide = if dst.len() < 8 { 0 } else { ((dst.len() - 8) / step + 1).min(src.len() / 8) };
    for g in src[..8 * wide].chunks_exact(8) {
        let word = gather::<B>(u64::from_le_bytes(g.try_into().unwrap()));
        dst[at..at + 8].copy_from_slice(&word.to_le_bytes());
        at += step;
    }
    let mut groups = src[8 * wide..].chunks_exact(8);
    for g in &mut groups {
        let word = gather::<B>(u64::from_le_bytes(g.try_into().unwrap()));
        dst[at..at + step].copy_from_slice(&word.to_le_bytes()[..step]);
        at += step;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        let mut g = [0u8; 8];
        g[..rest.len()].copy_from_slice(rest);
        let word = gather::<B>(u64::from_le_bytes(g)).to_le_bytes();
        let n = dst.len() - at;
        dst[at..].copy_from_slice(&word[..n]);
    }
}

fn unpack<const B: u32>(src: &[u8], dst: &mut [u8]) {
    let step = B as usize;
    let mut at = 0;
    let wide = if src.len() < 8 { 0 } else { ((src.len() - 8) / step + 1).min(dst.len() / 8) };
    let (head, tail) = dst.split_at_mut(8 * wide);
    for g in head.chunks_exact_mut(8) {
        let word = u64::from_le_bytes(src[at..at + 8].try_into().unwrap()) & const { (1u64 << (8 * B)) - 1 };
        g.copy_from_slice(&spread::<B>(word).to_le_bytes());
        at += step;
    }
    let mut groups = tail.chunks_exact_mut(8);
    for g in &mut groups {
        let mut word = [0u8; 8];
        word[..step].copy_from_slice(&src[at..at + step]);
        g.copy_from_slice(&spread::<B>(u64::from_le_bytes(word)).to_le_bytes());
        at += step;
    }
    let rest = groups.into_remainder();
    if !rest.is_empty() {
        let mut word = [0u8; 8];
        word[..src.len() - at].copy_from_slice(&src[at..]);
        let bytes = spread::<B>(u64::from_le_bytes(word)).to_le_bytes();
        let n = rest.len();
        rest.copy_from_slice(&bytes[..n]);
    }
}

/// Packs the low `bits` of every byte of the row `src [K]` into `dst [ceil(K·bits/8)]`.
///
/// # Panics
/// If `bits` is not 1..=4 or `dst` has another length.
pub fn pack_row(bits: u8, src: &[u8], dst: &mut [u8]) {
    assert_eq!(dst.len(), row_bytes(src.len(), bits as usize));
    match bits {
        1 => pack::<1>(src, dst),
        2 => pack::<2>(src, dst),
        3 => pack::<3>(src, dst),
        4 => pack::<4>(src, dst),
        _ => panic!("bits must be 1..=4"),
    }
}

/// The inverse of [`pack_row`]: one byte an element, in `dst [K]`.
///
/// # Panics
/// If `bits` is not 1..=4 or `src` has another length than the packed row.
pub fn unpack_row(bits: u8, src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), row_bytes(dst.len(), bits as usize));
    match bits {
        1 => unpack::<1>(src, dst),
        2 => unpack::<2>(src, dst),
        3 => unpack::<3>(src, dst),
        4 => unpack::<4>(src, dst),
        _ => panic!("bits must be 1..=4"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_and_bits_round_trips_and_follows_the_definition() {
        for bits in 1..=4u8 {
            for width in (1..70).chain([96, 127, 128, 160, 161, 1000]) {
                let src: Vec<u8> = (0..width).map(|i| ((i * 7 + i / 3) % 256) as u8).collect();
                let mut packed = vec![0xff; row_bytes(width, bits as usize)];
                pack_row(bits, &src, &mut packed);
                for (j, v) in src.iter().enumerate() {
                    for k in 0..bits as usize {
                        let at = bits as usize * j + k;
                        assert_eq!(packed[at / 8] >> (at % 8) & 1, v >> k & 1, "bits {bits} width {width} element {j}");
                    }
                }
                let used = width * bits as usize;
                if used % 8 != 0 {
                    assert_eq!(packed[used / 8] >> (used % 8), 0, "padding is zero");
                }
                let mut back = vec![0; width];
                unpack_row(bits, &packed, &mut back);
                let mask = (1u8 << bits) - 1;
                assert!(src.iter().zip(&back).all(|(a, b)| a & mask == *b));
            }
        }
    }
}
