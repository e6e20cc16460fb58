use super::Chain;
use crate::element::E2m1;
use crate::float::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use crate::reciprocal::approximate_reciprocal;
use crate::scale::{e4m3_decode, e4m3_encode, SIXTH};
use crate::values::Dtype;

/// s = e4m3(amax * (g * fl(1/6))); z = x * min(1 / (s * (1/g)), FLT_MAX).
#[derive(Clone, Copy)]
pub(crate) struct Exact {
    range: f32,
    inverse: f32,
}

impl Chain for Exact {
    type Scale = u8;
    type Element = E2m1<false, true>;
    const BLOCK: usize = 16;

    #[inline(always)]
    fn new(global: f32, _: Dtype) -> Self {
        Exact { range: global * SIXTH, inverse: 1.0 / global }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        e4m3_encode(amax * self.range)
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        let factor = 1.0 / (e4m3_decode(scale) * self.inverse);
        if factor > f32::MAX {
            f32::MAX
        } else {
            factor
        }
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e4m3_decode(scale), self.inverse)
    }
}

/// s = e4m3(g * (amax * rcp(6))); z = x * rcp(s * rcp(g)), 0 where s = 0.
#[derive(Clone, Copy)]
pub(crate) struct Fast {
    global: f32,
    sixth: f32,
    approximate: f32,
    inverse: f32,
}

impl Chain for Fast {
    type Scale = u8;
    type Element = E2m1<false, true>;
    const BLOCK: usize = 16;

    #[inline(always)]
    fn new(global: f32, _: Dtype) -> Self {
        let (sixth, approximate) = (approximate_reciprocal(6.0), approximate_reciprocal(global));
        Fast { global, sixth, approximate, inverse: 1.0 / global }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        e4m3_encode(self.global * (amax * self.sixth))
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        let value = e4m3_decode(scale);
        if value == 0.0 {
            return 0.0;
        }
        approximate_reciprocal(value * self.approximate)
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e4m3_decode(scale), self.inverse)
    }
}

/// nvidia-modelopt: s = e4m3(max(amax / (6 s2), 2^-9)), 1 for a zero block; z = x / (s s2).
#[derive(Clone, Copy)]
pub(crate) struct ModelOpt {
    global: f32,
    six: f32,
}

impl Chain for ModelOpt {
    type Scale = u8;
    type Element = E2m1<false, false>;
    const BLOCK: usize = 16;

    #[inline(always)]
    fn new(global: f32, _: Dtype) -> Self {
        ModelOpt { global, six: 6.0 * global }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        let ratio = amax / self.six;
        let ratio = if ratio == 0.0 { 1.0 } else { ratio };
        e4m3_encode(if ratio < 0.001_953_125 { 0.001_953_125 } else { ratio })
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        e4m3_decode(scale) * self.global
    }

    #[inline(always)]
    fn normalise(x: f32, factor: f32) -> f32 {
        x / factor
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e4m3_decode(scale) * self.global, 1.0)
    }
}

/// torchao: s = e4m3(max((amax / 6) / s2, 2^-6)); z = x * ((1 / s2) / s).
#[derive(Clone, Copy)]
pub(crate) struct TorchAo {
    global: f32,
    inverse: f32,
}

impl Chain for TorchAo {
    type Scale = u8;
    type Element = E2m1<false, true>;
    const BLOCK: usize = 16;

    #[inline(always)]
    fn new(global: f32, _: Dtype) -> Self {
        TorchAo { global, inverse: 1.0 / global }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        let ratio = (amax / 6.0) / self.global;
        e4m3_encode(if ratio < 0.015_625 { 0.015_625 } else { ratio })
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        self.inverse / e4m3_decode(scale)
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e4m3_decode(scale) * self.global, 1.0)
    }
}

/// compressed-tensors: s = e4m3(g * (amax / 6)), amax / 6 in the source's own type, 0.125 for zero; z = x / (s / g).
#[derive(Clone, Copy)]
pub(crate) struct CompressedTensors {
    global: f32,
    dtype: Dtype,
}

impl Chain for CompressedTensors {
    type Scale = u8;
    type Element = E2m1<false, false>;
    const BLOCK: usize = 16;

    #[inline(always)]
    fn new(global: f32, dtype: Dtype) -> Self {
        CompressedTensors { global, dtype }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        let sixth = amax / 6.0;
        let sixth = match self.dtype {
            Dtype::F32 => sixth,
            Dtype::Bf16 => f32_of_bf16(bf16_of_f32(sixth)),
            Dtype::F16 => f32_of_f16(f16_of_f32(sixth)),
        };
        match e4m3_encode(self.global * sixth) {
            0 => 0x20,
            scale => scale,
        }
    }

    #[inline(always)]
    fn factor(self, scale: u8, _: f32) -> f32 {
        e4m3_decode(scale) / self.global
    }

    #[inline(always)]
    fn normalise(x: f32, factor: f32) -> f32 {
        x / factor
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        (e4m3_decode(scale) / self.global, 1.0)
    }
}
