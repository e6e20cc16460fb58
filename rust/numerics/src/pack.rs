//! Codes, one a byte, to and from packed bits: element j at bits [b j, b j + b), least significant first.
use crate::isa::dispatched;

/// Bytes of a row of `k` elements of `bits` bits.
pub fn low_bytes(k: usize, bits: u32) -> usize {
    (k * bits as usize).div_ceil(8)
}

dispatched! {
    /// Packs the low `bits` (1..=4) bits of codes; a multiple of eight of them, `out` as long as is wanted of those.
    fn pack(codes: &[u8], bits: u32, out: &mut [u8]) = pack_low
}

#[inline(always)]
fn pack_low(codes: &[u8], bits: u32, out: &mut [u8]) {
    match bits {
        1 => spread::<1>(codes, out, |w| (w & 0x0101_0101_0101_0101).wrapping_mul(0x0102_0408_1020_4080) >> 56),
        2 => spread::<2>(codes, out, |w| {
            let w = w & 0x0303_0303_0303_0303;
            let w = (w | w >> 6) & 0x000F_000F_000F_000F;
            let w = w | w >> 12;
            (w & 0xFF) | (w >> 24 & 0xFF00)
        }),
        3 => spread::<3>(codes, out, |w| {
            let w = w & 0x0707_0707_0707_0707;
            let w = (w | w >> 5) & 0x003F_003F_003F_003F;
            let w = (w | w >> 10) & 0x0000_0FFF_0000_0FFF;
            (w | w >> 20) & 0xFF_FFFF
        }),
        _ => pack_nibbles(codes, out),
    }
}

#[inline(always)]
fn spread<const BYTES: usize>(codes: &[u8], out: &mut [u8], squeeze: impl Fn(u64) -> u64) {
    let mut groups = codes.chunks_exact(8);
    let mut chunks = out.chunks_exact_mut(BYTES);
    for (o, group) in (&mut chunks).zip(&mut groups) {
        let word = squeeze(u64::from_le_bytes(group.try_into().expect("eight bytes")));
        o.copy_from_slice(&word.to_le_bytes()[..BYTES]);
    }
    let rest = chunks.into_remainder();
    if let Some(group) = groups.next() {
        let word = squeeze(u64::from_le_bytes(group.try_into().expect("eight bytes")));
        rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
    }
}

/// Two codes a byte, the first in the low nibble.
#[inline(always)]
fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
    for (o, pair) in out.iter_mut().zip(codes.chunks_exact(2)) {
        *o = pair[0] | pair[1] << 4;
    }
}

dispatched! {
    /// The inverse for one row or a part of it that begins at a byte: as many codes as `out` is long.
    fn unpack(packed: &[u8], bits: u32, out: &mut [u8]) = unpack_low
}

#[inline(always)]
fn unpack_low(packed: &[u8], bits: u32, out: &mut [u8]) {
    match bits {
        1 => gather::<1, 8>(packed, out),
        2 => gather::<2, 4>(packed, out),
        4 => gather::<4, 2>(packed, out),
        _ => {
            for (group, o) in packed.chunks(3).zip(out.chunks_mut(8)) {
                let mut word = [0; 4];
                word[..group.len()].copy_from_slice(group);
                let word = u32::from_le_bytes(word);
                for (i, code) in o.iter_mut().enumerate() {
                    *code = (word >> (3 * i) & 7) as u8;
                }
            }
        }
    }
}

#[inline(always)]
fn gather<const BITS: u32, const CODES: usize>(packed: &[u8], out: &mut [u8]) {
    for (codes, &byte) in out.chunks_mut(CODES).zip(packed) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = byte >> (BITS * i as u32) & ((1 << BITS) - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_has_its_place() {
        let mut state = 1u32;
        let codes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 28) as u8
        })
        .take(64)
        .collect();
        for bits in 1..=4u32 {
            for k in 0..=57 {
                let mut padded = codes[..k].to_vec();
                padded.resize(k.next_multiple_of(8), 0);
                let mut packed = vec![0; low_bytes(k, bits)];
                pack_low(&padded, bits, &mut packed);
                for (j, &code) in codes[..k].iter().enumerate() {
                    for bit in 0..bits as usize {
                        let at = bits as usize * j + bit;
                        assert_eq!(packed[at / 8] >> (at % 8) & 1, code >> bit & 1, "{bits} bits, {k}, {j}");
                    }
                }
                let mut back = vec![0; k];
                unpack_low(&packed, bits, &mut back);
                assert!(back.iter().zip(&codes).all(|(b, c)| *b == c & ((1 << bits) - 1)), "{bits} bits, {k}");
            }
        }
    }
}
