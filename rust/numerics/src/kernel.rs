//! Work on a piece of a row that stays in the first-level cache.
use crate::chain::Chain;
use crate::element::Element;
use crate::float::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use crate::isa::{dispatched, Isa};
use crate::scale::{INFINITY_BITS, MAGNITUDE};
use crate::values::{Values, ValuesMut};

/// Elements of a piece: whole blocks of every profile, whole bytes of every packing.
pub(crate) const CHUNK: usize = 512;
/// Blocks of 16 in a piece.
const BLOCKS: usize = CHUNK / 16;

/// Buffers of a piece.
pub(crate) struct Work {
    /// Instructions to use.
    pub isa: Isa,
    /// Source values.
    pub x: [f32; CHUNK],
    /// Largest magnitude of each block.
    pub amax: [f32; BLOCKS],
    /// What the chain normalises by.
    pub factor: [f32; BLOCKS],
    /// One code an element.
    pub codes: [u8; CHUNK],
    /// Quantised values.
    pub values: [f32; CHUNK],
    /// For a chain's own use.
    pub spare: [f32; CHUNK],
}

impl Work {
    pub fn new(isa: Isa) -> Self {
        let zeros = [0.0; CHUNK];
        Work {
            isa,
            x: zeros,
            amax: [0.0; BLOCKS],
            factor: [0.0; BLOCKS],
            codes: [0; CHUNK],
            values: zeros,
            spare: zeros,
        }
    }

    /// Values of the codes, as quantise-dequantise has them.
    #[inline(always)]
    pub fn dequantise<C: Chain>(&mut self, chain: C, scales: &[C::Scale], n: usize) {
        let block = if C::BLOCK == 0 { CHUNK } else { C::BLOCK };
        let sources = self.x[..n].chunks(block).zip(self.codes.chunks(block));
        for ((values, (x, codes)), &scale) in self.values[..n].chunks_mut(block).zip(sources).zip(scales) {
            let (a, b) = chain.weights(scale);
            for ((value, &x), &code) in values.iter_mut().zip(x).zip(codes) {
                *value = (C::Element::rounded(code, x) * a) * b;
            }
        }
    }
}

dispatched! {
    /// Elements `at..at + n` as fp32, then zeros up to `padded`.
    fn load(x: Values<'_>, at: usize, n: usize, padded: usize, out: &mut [f32; CHUNK]) = load_values
}

#[inline(always)]
fn load_values(x: Values<'_>, at: usize, n: usize, padded: usize, out: &mut [f32; CHUNK]) {
    match x {
        Values::F32(x) => out[..n].copy_from_slice(&x[at..at + n]),
        Values::Bf16(x) => {
            for (o, &v) in out[..n].iter_mut().zip(&x[at..at + n]) {
                *o = f32_of_bf16(v);
            }
        }
        Values::F16(x) => {
            for (o, &v) in out[..n].iter_mut().zip(&x[at..at + n]) {
                *o = f32_of_f16(v);
            }
        }
    }
    out[n..padded].fill(0.0);
}

dispatched! {
    /// Writes values at `at`, rounded to the output's type.
    fn store(out: &mut ValuesMut<'_>, at: usize, values: &[f32]) = store_values
}

#[inline(always)]
fn store_values(out: &mut ValuesMut<'_>, at: usize, values: &[f32]) {
    match out {
        ValuesMut::F32(out) => out[at..at + values.len()].copy_from_slice(values),
        ValuesMut::Bf16(out) => {
            for (o, &v) in out[at..at + values.len()].iter_mut().zip(values) {
                *o = bf16_of_f32(v);
            }
        }
        ValuesMut::F16(out) => {
            for (o, &v) in out[at..at + values.len()].iter_mut().zip(values) {
                *o = f16_of_f32(v);
            }
        }
    }
}

dispatched! {
    /// Largest magnitude, NaN ignored, of each of the first blocks of `block` (16, 32 or 128) elements.
    fn block_maxima(x: &[f32; CHUNK], block: usize, out: &mut [f32]) = maxima_of_blocks
}

#[inline(always)]
fn maxima_of_blocks(x: &[f32; CHUNK], block: usize, out: &mut [f32]) {
    match block {
        16 => maxima::<16>(x, out),
        32 => maxima::<32>(x, out),
        _ => maxima::<128>(x, out),
    }
}

#[inline(always)]
fn maxima<const BLOCK: usize>(x: &[f32; CHUNK], out: &mut [f32]) {
    let mut largest = 0;
    for (amax, x) in out.iter_mut().zip(x.chunks_exact(BLOCK)) {
        let bits = x.iter().fold(0, |most, x| most.max((x.to_bits() & MAGNITUDE) as i32));
        *amax = f32::from_bits(bits as u32);
        largest = largest.max(bits);
    }
    if largest as u32 > INFINITY_BITS {
        for (amax, x) in out.iter_mut().zip(x.chunks_exact(BLOCK)) {
            *amax = x.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        }
    }
}

dispatched! {
    /// Raises `amax` to the largest magnitude, NaN ignored, of values.
    fn maximum(x: &[f32], amax: &mut f32) = maximum_of
}

#[inline(always)]
fn maximum_of(x: &[f32], amax: &mut f32) {
    let mut lanes = [0; 32];
    let whole = x.chunks_exact(32);
    let rest = whole.remainder();
    for x in whole {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = (x.to_bits() & MAGNITUDE).max(*lane);
        }
    }
    let bits = rest.iter().fold(0, |most, x| (x.to_bits() & MAGNITUDE).max(most));
    let bits = lanes.into_iter().fold(bits, u32::max);
    *amax = if bits > INFINITY_BITS {
        x.iter().fold(*amax, |most, x| most.max(x.abs()))
    } else {
        amax.max(f32::from_bits(bits))
    };
}
