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

fn pack<const B: u32>(src: &[u8], dst: &mut [u8]) {
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
            for width in 1..70usize {
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
