//! bf16 and fp16 as their bits, without branches so that loops over them vectorise.

#[inline(always)]
pub(crate) fn f32_of_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// To nearest, ties to even; any NaN becomes the quiet one of its sign.
#[inline(always)]
pub(crate) fn bf16_of_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded }) as u16
}

#[inline(always)]
pub(crate) fn f32_of_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let exponent = magnitude & 0x0F80_0000;
    let normal = magnitude + (112 << 23);
    // A subnormal's fraction under the smallest normal exponent, less the one that exponent implies.
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let special = magnitude + (224 << 23);
    let value = if exponent == 0 { subnormal } else { normal };
    let value = if exponent == 0x0F80_0000 { special } else { value };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// To nearest, ties to even; overflow is an infinity.
#[inline(always)]
pub(crate) fn f16_of_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + (magnitude >> 13 & 1)) >> 13;
    // Adding 0.5 leaves an fp32 whose last bit weighs 2^-24, fp16's smallest step.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let small = if magnitude < 113 << 23 { subnormal } else { normal };
    let finite = if magnitude >= 0x477F_F000 { 0x7C00 } else { small };
    let code = if magnitude > 0x7F80_0000 { 0x7E00 } else { finite };
    (code | bits >> 16 & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_comes_back() {
        for bits in 0..=u16::MAX {
            let nan = bits & 0x7FFF > 0x7F80;
            assert_eq!(bf16_of_f32(f32_of_bf16(bits)), if nan { bits | 0x40 } else { bits });
        }
    }

    #[test]
    fn f16_comes_back_and_has_its_value() {
        for bits in 0..=u16::MAX {
            let (e, m) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let value = f64::from(f32_of_f16(bits));
            if e == 31 {
                assert_eq!((value.is_nan(), value.is_infinite()), (m != 0.0, m == 0.0));
            } else {
                let want = if e == 0 { m * 2f64.powi(-24) } else { (1.0 + m / 1024.0) * 2f64.powi(e - 15) };
                assert_eq!(value.abs(), want);
                assert_eq!(f16_of_f32(value as f32), bits);
            }
        }
    }

    #[test]
    fn f16_midpoints_go_to_even() {
        for bits in 0..0x7BFFu16 {
            let (low, high) = (f64::from(f32_of_f16(bits)), f64::from(f32_of_f16(bits + 1)));
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(f16_of_f32(middle), bits + (bits & 1), "{bits:#x}");
            assert_eq!(f16_of_f32(f32::from_bits(middle.to_bits() + 1)), bits + 1);
            assert_eq!(f16_of_f32(f32::from_bits(middle.to_bits() - 1)), bits);
        }
        assert_eq!(f16_of_f32(65519.996), 0x7BFF);
        assert_eq!(f16_of_f32(65520.0), 0x7C00);
    }
}
