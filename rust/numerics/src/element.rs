//! Element formats: what a value over its scale rounds to, and what a code stands for.
use crate::scale::{e4m3_decode, e4m3_encode, e4m3_truncate, INFINITY_BITS, MAGNITUDE, SIGN};

pub(crate) trait Element: Copy {
    /// Bits of a code.
    const BITS: u32;
    /// Code of a value over its scale.
    fn code(z: f32) -> u8;
    /// Value of a code.
    fn decode(code: u8) -> f32;
    /// Value that quantise-dequantise gives source `x`, whose code is `code`: `decode` but for the sign of zero.
    fn rounded(code: u8, x: f32) -> f32;
}

const ONE: u32 = 0x3F80_0000;
// 1.5 * 2^22 times the value's own power of two: adding it leaves an fp32 whose last bit weighs one E2M1 step.
const MAGIC: u32 = (22 << 23) | 0x40_0000;

/// E2M1: `sign << 3 | magnitude`, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; saturating; NaN is +6.
///
/// `AWAY` sends midpoints away from zero, else to the even code; `MINUS_ZERO` keeps the sign of -0 (code 8).
#[derive(Clone, Copy)]
pub(crate) struct E2m1<const AWAY: bool, const MINUS_ZERO: bool>;

impl<const AWAY: bool, const MINUS_ZERO: bool> E2m1<AWAY, MINUS_ZERO> {
    /// Code of a value over its scale, and what it stands for.
    #[inline(always)]
    pub(crate) fn round(z: f32) -> (u8, f32) {
        let magnitude = z.to_bits() & MAGNITUDE;
        let a = f32::from_bits(magnitude);
        let a = if a < 6.0 { a } else { 6.0 };
        let bits = if AWAY { a.to_bits() | 1 } else { a.to_bits() };
        let exponent = (bits & INFINITY_BITS).max(ONE);
        let magic = exponent + MAGIC;
        // With n the multiple of the step 2^(e-1), the code is n + 2e; the exponent field >> 22 is 254 + 2e.
        let shifted = f32::from_bits(bits) + f32::from_bits(magic);
        let code = shifted.to_bits().wrapping_sub(magic).wrapping_add(exponent >> 22).wrapping_add(2) & 7;
        let value = (shifted - f32::from_bits(magic)).to_bits();
        let signed = if MINUS_ZERO { magnitude <= INFINITY_BITS } else { z < 0.0 };
        let sign = if signed { z.to_bits() & SIGN } else { 0 };
        ((code | sign >> 28) as u8, f32::from_bits(value | sign))
    }
}

impl<const AWAY: bool, const MINUS_ZERO: bool> Element for E2m1<AWAY, MINUS_ZERO> {
    const BITS: u32 = 4;

    #[inline(always)]
    fn code(z: f32) -> u8 {
        Self::round(z).0
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let magnitude = u32::from(code & 7);
        let normal = (magnitude << 22) + (126 << 23);
        let small = (magnitude as i32 as f32 * 0.5).to_bits();
        let bits = if magnitude < 2 { small } else { normal };
        f32::from_bits(bits | u32::from(code & 8) << 28)
    }

    #[inline(always)]
    fn rounded(code: u8, _: f32) -> f32 {
        Self::decode(code) + 0.0
    }
}

/// INT8 in -127..=127: halves away from zero, or `TRUNCATE`d; NaN is 0.
#[derive(Clone, Copy)]
pub(crate) struct Int8<const TRUNCATE: bool>;

impl<const TRUNCATE: bool> Element for Int8<TRUNCATE> {
    const BITS: u32 = 8;

    #[inline(always)]
    fn code(z: f32) -> u8 {
        let a = f32::from_bits(z.to_bits() & MAGNITUDE);
        let a = if a < 127.0 { a } else { 127.0 };
        // SAFETY: 0 <= a <= 127.
        let whole = unsafe { a.to_int_unchecked::<i32>() };
        let up = !TRUNCATE && a - whole as f32 >= 0.5;
        let magnitude = if z.is_nan() { 0 } else { whole + i32::from(up) };
        (if z < 0.0 { -magnitude } else { magnitude }) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        f32::from(code as i8)
    }

    #[inline(always)]
    fn rounded(code: u8, x: f32) -> f32 {
        if TRUNCATE {
            signed_zero(Self::decode(code), x)
        } else {
            Self::decode(code)
        }
    }
}

/// INT4 in -8..=7, two's complement in the low four bits: halves to even; NaN is 0.
#[derive(Clone, Copy)]
pub(crate) struct Int4;

impl Element for Int4 {
    const BITS: u32 = 4;

    #[inline(always)]
    fn code(z: f32) -> u8 {
        let z = if z.is_nan() { 0.0 } else { z };
        let z = if z < 7.0 { z } else { 7.0 };
        let z = if z > -8.0 { z } else { -8.0 };
        ((z + 12_582_912.0).to_bits() & 15) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        (i32::from(code ^ 8) - 8) as f32
    }

    #[inline(always)]
    fn rounded(code: u8, x: f32) -> f32 {
        signed_zero(Self::decode(code), x)
    }
}

/// A zero takes the sign of the finite source it came from.
#[inline(always)]
fn signed_zero(q: f32, x: f32) -> f32 {
    if q == 0.0 && x.to_bits() & MAGNITUDE < INFINITY_BITS {
        q.copysign(x)
    } else {
        q
    }
}

/// E4M3, saturating at 448: to nearest even, or `TRUNCATE`d; NaN stays NaN.
#[derive(Clone, Copy)]
pub(crate) struct E4m3<const TRUNCATE: bool>;

impl<const TRUNCATE: bool> Element for E4m3<TRUNCATE> {
    const BITS: u32 = 8;

    #[inline(always)]
    fn code(z: f32) -> u8 {
        if TRUNCATE {
            e4m3_truncate(z)
        } else {
            e4m3_encode(z)
        }
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        e4m3_decode(code)
    }

    #[inline(always)]
    fn rounded(code: u8, _: f32) -> f32 {
        e4m3_decode(code)
    }
}
