//! Block scales: E4M3 and E8M0 bytes, and plain fp32.
use crate::values::{Scales, ScalesMut};

/// fl32(1/6).
pub(crate) const SIXTH: f32 = f32::from_bits(0x3E2A_AAAB);
/// fl32(1/448).
pub(crate) const ONE_448TH: f32 = f32::from_bits(0x3B12_4925);
pub(crate) const INFINITY_BITS: u32 = 0x7F80_0000;
pub(crate) const MAGNITUDE: u32 = 0x7FFF_FFFF;
pub(crate) const SIGN: u32 = 0x8000_0000;

/// How a profile stores the scale of a block.
pub(crate) trait Scale: Copy + Default {
    fn of<'a>(scales: &'a mut ScalesMut<'_>) -> Option<&'a mut [Self]>;
    fn read<'a>(scales: &Scales<'a>) -> Option<&'a [Self]>;
}

impl Scale for u8 {
    fn of<'a>(scales: &'a mut ScalesMut<'_>) -> Option<&'a mut [u8]> {
        match scales {
            ScalesMut::Bytes(bytes) => Some(bytes),
            ScalesMut::F32(_) => None,
        }
    }
    fn read<'a>(scales: &Scales<'a>) -> Option<&'a [u8]> {
        match scales {
            Scales::Bytes(bytes) => Some(bytes),
            Scales::F32(_) => None,
        }
    }
}

impl Scale for f32 {
    fn of<'a>(scales: &'a mut ScalesMut<'_>) -> Option<&'a mut [f32]> {
        match scales {
            ScalesMut::Bytes(_) => None,
            ScalesMut::F32(values) => Some(values),
        }
    }
    fn read<'a>(scales: &Scales<'a>) -> Option<&'a [f32]> {
        match scales {
            Scales::Bytes(_) => None,
            Scales::F32(values) => Some(values),
        }
    }
}

/// E4M3 byte of an fp32 value: to nearest, ties to even, saturating at 448; NaN is 0x7F, with its sign.
#[inline(always)]
pub(crate) fn e4m3_encode(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let clamped = magnitude.min(448f32.to_bits());
    let normal = ((clamped + (0x7_FFFF + (clamped >> 20 & 1))) >> 20).wrapping_sub(120 << 3);
    // The last bit of 2^14 weighs 2^-9, E4M3's smallest step; rounding up to 2^-6 gives the first normal byte.
    let subnormal = (f32::from_bits(clamped) + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
    let byte = if clamped < 121 << 23 { subnormal } else { normal };
    let byte = if magnitude > INFINITY_BITS { 0x7F } else { byte };
    (byte | bits >> 24 & 0x80) as u8
}

/// The same, towards zero.
#[inline(always)]
pub(crate) fn e4m3_truncate(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let clamped = magnitude.min(448f32.to_bits());
    let normal = (clamped >> 20).wrapping_sub(120 << 3);
    // The clamp keeps the conversion in range; it decides nothing, as larger values take the other branch.
    let steps = f32::from_bits(clamped.min(121 << 23)) * 512.0;
    // SAFETY: 0 <= steps <= 8.
    let subnormal = unsafe { steps.to_int_unchecked::<i32>() } as u32;
    let byte = if clamped < 121 << 23 { subnormal } else { normal };
    let byte = if magnitude > INFINITY_BITS { 0x7F } else { byte };
    (byte | bits >> 24 & 0x80) as u8
}

/// fp32 value of an E4M3 byte; 0x7F and 0xFF are NaN.
#[inline(always)]
pub(crate) fn e4m3_decode(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7F);
    let normal = (magnitude << 20) + (120 << 23);
    let subnormal = (magnitude as i32 as f32 * 0.001_953_125).to_bits();
    let bits = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == 127 { 0x7FC0_0000 } else { bits };
    f32::from_bits(bits | u32::from(byte & 0x80) << 24)
}

/// 2^(byte - 127); 255 is NaN.
#[inline(always)]
pub(crate) fn e8m0_decode(byte: u8) -> f32 {
    let bits = if byte == 0 { 0x0040_0000 } else { u32::from(byte) << 23 };
    f32::from_bits(if byte == 255 { 0x7FC0_0000 } else { bits })
}

/// 2^(127 - byte); 255 is NaN.
#[inline(always)]
pub(crate) fn e8m0_inverse(byte: u8) -> f32 {
    let exponent = 254 - i32::from(byte);
    let bits = if exponent <= 0 { 0x0040_0000 } else { (exponent as u32) << 23 };
    f32::from_bits(if exponent < 0 { 0x7FC0_0000 } else { bits })
}

/// Biased exponent of the least power of two not below `value` >= 0; 0 for anything up to 2^-127.
///
/// From the bits: a logarithm in fp32 is wrong one or two ulps above a power of two.
#[inline(always)]
pub(crate) fn ceil_exponent(value: f32) -> i32 {
    let bits = value.to_bits();
    if bits > 0x40_0000 {
        (bits.wrapping_add(0x7F_FFFF) >> 23) as i32
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_comes_back_and_rounds_to_even() {
        for byte in 0..0x7Eu8 {
            let (low, high) = (e4m3_decode(byte), e4m3_decode(byte + 1));
            assert_eq!((e4m3_encode(low), e4m3_encode(-low)), (byte, byte | 0x80));
            let middle = (low + high) / 2.0;
            assert_eq!(e4m3_encode(middle), byte + (byte & 1));
            assert_eq!(e4m3_encode(f32::from_bits(middle.to_bits() + 1)), byte + 1);
            assert_eq!(e4m3_encode(f32::from_bits(middle.to_bits() - 1)), byte);
            assert_eq!(e4m3_truncate(f32::from_bits(high.to_bits() - 1)), byte);
            assert_eq!(e4m3_truncate(low), byte);
        }
        for big in [448.0, 449.0, 1e30, f32::INFINITY] {
            assert_eq!((e4m3_encode(big), e4m3_truncate(-big)), (0x7E, 0xFE));
        }
        assert_eq!((e4m3_encode(f32::NAN) & 0x7F, e4m3_truncate(f32::NAN) & 0x7F), (0x7F, 0x7F));
        assert!(e4m3_decode(0x7F).is_nan() && e4m3_decode(0xFF).is_nan());
    }

    #[test]
    fn e8m0_values() {
        for byte in 0..255u8 {
            assert_eq!(f64::from(e8m0_decode(byte)), 2f64.powi(i32::from(byte) - 127));
            assert_eq!(f64::from(e8m0_inverse(byte)), 2f64.powi(127 - i32::from(byte)));
        }
        assert!(e8m0_decode(255).is_nan() && e8m0_inverse(255).is_nan());
    }

    #[test]
    fn ceil_exponent_is_exact_next_to_powers_of_two() {
        for e in 1..254u32 {
            let power = e << 23;
            assert_eq!(ceil_exponent(f32::from_bits(power)), e as i32);
            assert_eq!(ceil_exponent(f32::from_bits(power + 1)), e as i32 + 1);
            assert_eq!(ceil_exponent(f32::from_bits(power - 1)), e as i32);
        }
        assert_eq!((ceil_exponent(0.0), ceil_exponent(f32::from_bits(0x40_0000))), (0, 0));
    }
}
