use super::{Chain, Exact};
use crate::kernel::{Work, CHUNK};
use crate::scale::{e4m3_decode, e4m3_encode};
use crate::values::Dtype;

const BLOCK: usize = 16;
const BLOCKS: usize = CHUNK / BLOCK;

/// 4over6 (arXiv 2512.02010): each block with its maximum at 6 and at 4, and the better of the two.
///
/// s6 = e4m3((amax / 6) * g), s4 = e4m3(1.5 (amax / 6) g), z as in [`Exact`]; 4 only where its error is strictly
/// smaller. The error is the sum in order of (q s - x g)^2, or with `ABSOLUTE` of |q s - x g|.
#[derive(Clone, Copy)]
pub(crate) struct FourOverSix<const ABSOLUTE: bool> {
    global: f32,
    exact: Exact,
}

/// One way to quantise the blocks of a piece, and how far that leaves each from its source.
#[derive(Default)]
struct Candidate {
    scales: [u8; BLOCKS],
    factors: [f32; BLOCKS],
    values: [f32; BLOCKS],
    errors: [f32; BLOCKS],
}

impl<const ABSOLUTE: bool> FourOverSix<ABSOLUTE> {
    #[inline(always)]
    fn term(difference: f32) -> f32 {
        if ABSOLUTE {
            difference.abs()
        } else {
            difference * difference
        }
    }

    /// The scales that bring each block's maximum to 6, or with `stretch` 1.5 to 4.
    #[inline(always)]
    fn candidate(self, amax: &[f32], stretch: f32) -> Candidate {
        let mut out = Candidate::default();
        let places = out.scales.iter_mut().zip(&mut out.values).zip(&mut out.factors);
        for (((scale, value), factor), amax) in places.zip(amax) {
            *scale = e4m3_encode((amax / 6.0) * self.global * stretch);
            *value = e4m3_decode(*scale);
            *factor = self.exact.factor(*scale, 0.0);
        }
        out
    }

    /// Errors of both, and their codes: the first's in the low nibbles of `work.codes`, the second's above.
    #[inline(always)]
    fn try_both(self, work: &mut Work, blocks: usize, six: &mut Candidate, four: &mut Candidate) {
        let (six_terms, four_terms) = (&mut work.values, &mut work.spare);
        let terms = six_terms.chunks_exact_mut(BLOCK).zip(four_terms.chunks_exact_mut(BLOCK));
        let sources = work.codes.chunks_exact_mut(BLOCK).zip(work.x.chunks_exact(BLOCK));
        for (b, ((codes, x), (six_terms, four_terms))) in sources.zip(terms).take(blocks).enumerate() {
            for (((code, &x), six_term), four_term) in codes.iter_mut().zip(x).zip(six_terms).zip(four_terms) {
                let source = finite(x * self.global);
                let (low, q) = <Self as Chain>::Element::round(x * six.factors[b]);
                *six_term = Self::term(q * six.values[b] - source);
                let (high, q) = <Self as Chain>::Element::round(x * four.factors[b]);
                *four_term = Self::term(q * four.values[b] - source);
                *code = low | high << 4;
            }
        }
        // Eight blocks side by side: each sum keeps its order, and their additions overlap.
        for (tried, terms) in [(six, &work.values), (four, &work.spare)] {
            let groups = tried.errors.chunks_exact_mut(8).zip(terms.chunks_exact(8 * BLOCK));
            for (errors, terms) in groups.take(blocks.div_ceil(8)) {
                let mut sums = [0.0; 8];
                for i in 0..BLOCK {
                    for (b, sum) in sums.iter_mut().enumerate() {
                        *sum += terms[b * BLOCK + i];
                    }
                }
                errors.copy_from_slice(&sums);
            }
        }
    }
}

/// NaN as zero, infinities as the largest number.
#[inline(always)]
fn finite(x: f32) -> f32 {
    let x = if x > f32::MAX { f32::MAX } else { x };
    let x = if x < f32::MIN { f32::MIN } else { x };
    if x.is_nan() {
        0.0
    } else {
        x
    }
}

impl<const ABSOLUTE: bool> Chain for FourOverSix<ABSOLUTE> {
    type Scale = u8;
    type Element = <Exact as Chain>::Element;
    const BLOCK: usize = BLOCK;

    #[inline(always)]
    fn new(global: f32, dtype: Dtype) -> Self {
        FourOverSix { global, exact: Exact::new(global, dtype) }
    }

    #[inline(always)]
    fn scale(self, amax: f32) -> u8 {
        self.exact.scale(amax)
    }

    #[inline(always)]
    fn factor(self, scale: u8, amax: f32) -> f32 {
        self.exact.factor(scale, amax)
    }

    #[inline(always)]
    fn weights(self, scale: u8) -> (f32, f32) {
        self.exact.weights(scale)
    }

    #[inline(always)]
    fn encode(self, work: &mut Work, blocks: usize, scales: &mut [u8]) {
        let mut six = self.candidate(&work.amax[..blocks], 1.0);
        let mut four = self.candidate(&work.amax[..blocks], 1.5);
        self.try_both(work, blocks, &mut six, &mut four);
        // All ones where four is better: which one is is a coin's throw, so nothing branches on it.
        let mut masks = [0u8; BLOCKS];
        for (b, mask) in masks[..blocks].iter_mut().enumerate() {
            *mask = u8::from((four.errors[b] < six.errors[b]) & (work.amax[b] != 0.0)).wrapping_neg();
        }
        for (b, scale) in scales[..blocks].iter_mut().enumerate() {
            *scale = (four.scales[b] & masks[b]) | (six.scales[b] & !masks[b]);
        }
        for (codes, &mask) in work.codes.chunks_exact_mut(BLOCK).zip(&masks[..blocks]) {
            for half in codes.chunks_exact_mut(8) {
                let pairs = u64::from_le_bytes((&*half).try_into().expect("eight bytes"));
                half.copy_from_slice(&((pairs >> (mask & 4)) & 0x0F0F_0F0F_0F0F_0F0F).to_le_bytes());
            }
        }
    }
}
