//! Walks a matrix in pieces: quantisation, with whatever outputs are wanted, and dequantisation.
use crate::chain::Chain;
use crate::element::Element;
use crate::isa::dispatched;
use crate::kernel::{block_maxima, load, maximum, store, Work, CHUNK};
use crate::pack::{low_bytes, pack, unpack};
use crate::scale::Scale;
use crate::values::{Dtype, Global, Outputs, Scales, Values, ValuesMut};

/// Rows of `k` elements, and how far apart their outputs are.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub rows: usize,
    pub k: usize,
}

impl Shape {
    /// The same elements as one row, where no output knows where a row ends.
    pub fn flattened<C: Chain>(self, global: Global<'_>) -> Self {
        let one = !matches!(global, Global::Rows(_));
        if one && C::BLOCK > 0 && self.k % C::BLOCK == 0 {
            return Shape { rows: 1, k: self.rows * self.k };
        }
        self
    }

    pub fn scales<C: Chain>(self) -> usize {
        if C::BLOCK == 0 {
            usize::from(self.k > 0)
        } else {
            self.k.div_ceil(C::BLOCK)
        }
    }

    pub fn packed<C: Chain>(self) -> usize {
        if C::Element::BITS == 4 {
            self.k.div_ceil(2)
        } else {
            self.k
        }
    }
}

pub(crate) fn global_of(global: Global<'_>, row: usize) -> f32 {
    match global {
        Global::None => 1.0,
        Global::One(g) => g,
        Global::Rows(g) => g[row],
    }
}

/// The pieces of a row: (first element, elements).
pub(crate) fn pieces(k: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..k).step_by(CHUNK).map(move |at| (at, CHUNK.min(k - at)))
}

dispatched! {
    /// Quantises rows; outputs have the lengths that the shape asks for.
    fn quantize<C: Chain>(x: Values<'_>, shape: Shape, global: Global<'_>, out: &mut Outputs<'_>, work: &mut Work) = quantize_rows
}

#[inline(always)]
fn quantize_rows<C: Chain>(x: Values<'_>, shape: Shape, global: Global<'_>, out: &mut Outputs<'_>, work: &mut Work) {
    let shape = shape.flattened::<C>(global);
    for row in 0..shape.rows {
        let chain = C::new(global_of(global, row), x.dtype());
        if C::BLOCK == 0 {
            whole_row(chain, x, shape, row, out, work);
        } else {
            blocks_of_row(chain, x, shape, row, out, work);
        }
    }
}

/// A scale for each block of the row.
#[inline(always)]
fn blocks_of_row<C: Chain>(chain: C, x: Values<'_>, shape: Shape, row: usize, out: &mut Outputs<'_>, work: &mut Work) {
    let mut scales = [C::Scale::default(); CHUNK / 16];
    for (at, n) in pieces(shape.k) {
        let blocks = n.div_ceil(C::BLOCK);
        load(work.isa, x, row * shape.k + at, n, blocks * C::BLOCK, &mut work.x);
        block_maxima(work.isa, &work.x, C::BLOCK, &mut work.amax[..blocks]);
        chain.encode(work, blocks, &mut scales[..blocks]);
        if let Some(all) = out.scales.as_mut().and_then(|s| C::Scale::of(s)) {
            let first = row * shape.scales::<C>() + at / C::BLOCK;
            all[first..first + blocks].copy_from_slice(&scales[..blocks]);
        }
        write::<C>(chain, shape, row, at, n, &scales, out, work);
    }
}

/// One scale for the row, which is read twice.
#[inline(always)]
fn whole_row<C: Chain>(chain: C, x: Values<'_>, shape: Shape, row: usize, out: &mut Outputs<'_>, work: &mut Work) {
    let mut amax = 0f32;
    for (at, n) in pieces(shape.k) {
        load(work.isa, x, row * shape.k + at, n, n, &mut work.x);
        maximum(work.isa, &work.x[..n], &mut amax);
    }
    let scale = chain.scale(amax);
    let factor = chain.factor(scale, amax);
    if let Some(all) = out.scales.as_mut().and_then(|s| C::Scale::of(s)) {
        all[row..][..shape.scales::<C>()].fill(scale);
    }
    for (at, n) in pieces(shape.k) {
        load(work.isa, x, row * shape.k + at, n, n, &mut work.x);
        for (code, &x) in work.codes[..n].iter_mut().zip(&work.x[..n]) {
            *code = C::Element::code(C::normalise(x, factor));
        }
        write::<C>(chain, shape, row, at, n, &[scale], out, work);
    }
}

/// Writes what is wanted of a piece whose codes are known.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn write<C: Chain>(
    chain: C,
    shape: Shape,
    row: usize,
    at: usize,
    n: usize,
    scales: &[C::Scale],
    out: &mut Outputs<'_>,
    work: &mut Work,
) {
    if let Some(values) = out.values.as_mut() {
        work.dequantise(chain, scales, n);
        store(work.isa, values, row * shape.k + at, &work.values[..n]);
    }
    let padded = n.next_multiple_of(8);
    work.codes[n..padded].fill(0);
    if let Some(packed) = out.packed.as_mut() {
        let row = &mut packed[row * shape.packed::<C>()..][..shape.packed::<C>()];
        if C::Element::BITS == 4 {
            pack(work.isa, &work.codes[..padded], 4, &mut row[at / 2..(at + n).div_ceil(2)]);
        } else {
            row[at..at + n].copy_from_slice(&work.codes[..n]);
        }
    }
    if let Some((bits, low)) = out.low.as_mut() {
        let bytes = low_bytes(shape.k, *bits);
        let row = &mut low[row * bytes..][..bytes];
        pack(work.isa, &work.codes[..padded], *bits, &mut row[low_bytes(at, *bits)..low_bytes(at + n, *bits)]);
    }
}

dispatched! {
    /// Values of packed codes; arguments have the lengths that the shape asks for.
    fn dequantize<C: Chain>(
        packed: &[u8], scales: Scales<'_>, shape: Shape, global: Global<'_>, out: &mut ValuesMut<'_>, work: &mut Work,
    ) = dequantize_rows
}

#[inline(always)]
fn dequantize_rows<C: Chain>(
    packed: &[u8],
    scales: Scales<'_>,
    shape: Shape,
    global: Global<'_>,
    out: &mut ValuesMut<'_>,
    work: &mut Work,
) {
    let Some(scales) = C::Scale::read(&scales) else { return };
    let shape = shape.flattened::<C>(global);
    let block = if C::BLOCK == 0 { CHUNK } else { C::BLOCK };
    for row in 0..shape.rows {
        let chain = C::new(global_of(global, row), Dtype::F32);
        let packed = &packed[row * shape.packed::<C>()..][..shape.packed::<C>()];
        let scales = &scales[row * shape.scales::<C>()..][..shape.scales::<C>()];
        for (at, n) in pieces(shape.k) {
            if C::Element::BITS == 4 {
                unpack(work.isa, &packed[at / 2..], 4, &mut work.codes[..n]);
            } else {
                work.codes[..n].copy_from_slice(&packed[at..at + n]);
            }
            let codes = work.codes[..n].chunks(block);
            for (i, (values, codes)) in work.values[..n].chunks_mut(block).zip(codes).enumerate() {
                let (a, b) = chain.weights(scales[at.checked_div(C::BLOCK).map_or(0, |first| first + i)]);
                for (value, &code) in values.iter_mut().zip(codes) {
                    *value = (C::Element::decode(code) * a) * b;
                }
            }
            store(work.isa, out, row * shape.k + at, &work.values[..n]);
        }
    }
}
