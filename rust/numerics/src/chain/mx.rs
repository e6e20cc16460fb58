use super::Chain;
use crate::element::E2m1;
use crate::scale::{ceil_exponent, e8m0_decode, e8m0_inverse, INFINITY_BITS, SIXTH};
use crate::values::Dtype;

/// The exponent of amax/6 rounded up.
pub(crate) const RCEIL: u8 = 0;
/// The exponent of amax, less two.
pub(crate) const FLOOR: u8 = 1;
/// The same after rounding the mantissa at 1.75.
pub(crate) const EVEN: u8 = 2;

/// Blocks under a power of two in an E8M0 byte of at least `LEAST`; `HALF_UP` is SGLang's pool: midpoints away from
/// zero, and no -0.
#[derive(Clone, Copy)]
pub(crate) struct Mx<const BLOCK: usize, const RULE: u8, const LEAST: i32, const AWAY: bool, const MINUS_ZERO: bool>;

impl<const B: usize, const RULE: u8, const LEAST: i32, const AWAY: bool, const MINUS_ZERO: bool> Chain
    for Mx<B, RULE, LEAST, AWAY, MINUS_ZERO>
{
    type Scale = u8;
    type Element = E2m1<AWAY, MINUS_ZERO>;
    const BLOCK: usize = B;
    const MISSING: u8 = 0xFF;

    #[inline(always)]
    fn new(_: f32, _: Dtype) -> Self {
        Mx
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        let bits = amax.to_bits();
        let exponent = match RULE {
            RCEIL => ceil_exponent(amax * SIXTH),
            // An infinity must not carry into the sign.
            EVEN if bits < INFINITY_BITS => ((bits + (1 << 21)) >> 23) as i32 - 2,
            _ => (bits >> 23) as i32 - 2,
        };
        exponent.max(LEAST).min(254) as u8
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        e8m0_inverse(scale)
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e8m0_decode(scale), 1.0)
    }
}
