//! A profile's order of operations. All arithmetic is fp32, one rounding an operation, left to right as written.
mod eight_bit;
mod four_over_six;
mod mx;
mod nvfp4;

pub(crate) use eight_bit::{Fp8Row, Int4Group, Int8Row, Mxfp8};
pub(crate) use four_over_six::FourOverSix;
pub(crate) use mx::{Mx, EVEN, FLOOR, RCEIL};
pub(crate) use nvfp4::{CompressedTensors, Exact, Fast, ModelOpt, TorchAo};

use crate::element::Element;
use crate::kernel::Work;
use crate::scale::Scale;
use crate::values::Dtype;

pub(crate) trait Chain: Copy {
    type Scale: Scale;
    type Element: Element;
    /// Elements that share a scale; 0 for a whole row.
    const BLOCK: usize;
    /// Scale that stands for "not recorded".
    const MISSING: u8 = 0x7F;

    /// The chain under a global scale (ignored where the profile has none), for sources of that type.
    fn new(global: f32, dtype: Dtype) -> Self;
    /// Scale of a block whose largest magnitude, NaN ignored, is `amax`.
    fn scale(self, amax: f32) -> Self::Scale;
    /// What [`Chain::normalise`] takes, once a block.
    fn factor(self, scale: Self::Scale, amax: f32) -> f32;
    /// A source value over its block's scale: what the element rounding sees.
    #[inline(always)]
    fn normalise(x: f32, factor: f32) -> f32 {
        x * factor
    }
    /// (a, b) such that an element q of the block stands for (q * a) * b.
    fn weights(self, scale: Self::Scale) -> (f32, f32);

    /// Scales and codes of the blocks in `work`, from its values and block maxima.
    #[inline(always)]
    fn encode(self, work: &mut Work, blocks: usize, scales: &mut [Self::Scale]) {
        let (amax, factor) = (&work.amax[..blocks], &mut work.factor[..blocks]);
        for ((scale, factor), &amax) in scales.iter_mut().zip(factor).zip(amax) {
            *scale = self.scale(amax);
            *factor = self.factor(*scale, amax);
        }
        let codes = work.codes.chunks_exact_mut(Self::BLOCK);
        for ((codes, x), &factor) in codes.zip(work.x.chunks_exact(Self::BLOCK)).zip(&work.factor[..blocks]) {
            for (code, &x) in codes.iter_mut().zip(x) {
                *code = Self::Element::code(Self::normalise(x, factor));
            }
        }
    }
}
