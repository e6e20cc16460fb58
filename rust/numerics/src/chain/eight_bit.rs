//! INT8 and E4M3 per row, MXFP8, INT4 in groups.
use super::Chain;
use crate::element::{E4m3, Int4, Int8};
use crate::scale::{ceil_exponent, e8m0_decode, e8m0_inverse, ONE_448TH};
use crate::values::Dtype;

/// s = max(amax, 1e-10) / 127; q = round(x * (127 / max(amax, 1e-10))).
#[derive(Clone, Copy)]
pub(crate) struct Int8Row<const TRUNCATE: bool>;

impl<const TRUNCATE: bool> Chain for Int8Row<TRUNCATE> {
    type Scale = f32;
    type Element = Int8<TRUNCATE>;
    const BLOCK: usize = 0;

    #[inline(always)]
    fn new(_: f32, _: Dtype) -> Self {
        Int8Row
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> f32 {
        amax.max(1e-10) / 127.0
    }

    #[inline(always)]
    fn factor(self, _: f32, amax: f32) -> f32 {
        127.0 / amax.max(1e-10)
    }

    #[inline(always)]
    fn weights(self, scale: f32) -> (f32, f32) {
        (scale, 1.0)
    }
}

/// s = amax / 7.5, epsilon for zero; q = rint(x / s). Groups of 128.
#[derive(Clone, Copy)]
pub(crate) struct Int4Group;

impl Chain for Int4Group {
    type Scale = f32;
    type Element = Int4;
    const BLOCK: usize = 128;

    #[inline(always)]
    fn new(_: f32, _: Dtype) -> Self {
        Int4Group
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> f32 {
        let scale = amax / 7.5;
        if scale == 0.0 {
            f32::EPSILON
        } else {
            scale
        }
    }

    #[inline(always)]
    fn factor(self, scale: f32, _: f32) -> f32 {
        scale
    }

    #[inline(always)]
    fn normalise(x: f32, factor: f32) -> f32 {
        x / factor
    }

    #[inline(always)]
    fn weights(self, scale: f32) -> (f32, f32) {
        (scale, 1.0)
    }
}

/// s = amax / 448; z = x * (1 / s), 0 for a zero row.
#[derive(Clone, Copy)]
pub(crate) struct Fp8Row<const TRUNCATE: bool>;

impl<const TRUNCATE: bool> Chain for Fp8Row<TRUNCATE> {
    type Scale = f32;
    type Element = E4m3<TRUNCATE>;
    const BLOCK: usize = 0;

    #[inline(always)]
    fn new(_: f32, _: Dtype) -> Self {
        Fp8Row
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> f32 {
        amax / 448.0
    }

    #[inline(always)]
    fn factor(self, scale: f32, _: f32) -> f32 {
        if scale == 0.0 {
            0.0
        } else {
            1.0 / scale
        }
    }

    #[inline(always)]
    fn weights(self, scale: f32) -> (f32, f32) {
        (scale, 1.0)
    }
}

/// The scale byte is the exponent of amax * fl(1/448) rounded up; blocks of 32.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp8;

impl Chain for Mxfp8 {
    type Scale = u8;
    type Element = E4m3<false>;
    const BLOCK: usize = 32;
    const MISSING: u8 = 0xFF;

    #[inline(always)]
    fn new(_: f32, _: Dtype) -> Self {
        Mxfp8
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        ceil_exponent(amax * ONE_448TH).min(254) as u8
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
