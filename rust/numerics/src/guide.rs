//! Guided rounding: the rollout's low bits choose between the two neighbours of the trainer's value (TRACE, Alg. 1).
use std::sync::OnceLock;

use crate::chain::Chain;
use crate::element::Element;
use crate::isa::dispatched;
use crate::kernel::{block_maxima, load, store, Work, CHUNK};
use crate::pack::{low_bytes, unpack};
use crate::rows::{global_of, pieces, Shape};
use crate::scale::{MAGNITUDE, SIGN};
use crate::values::{Global, Values, ValuesMut};

/// What a grid value (saturation included) may round to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Itself.
    Bracket,
    /// Itself, or its neighbour towards the reconstructed codeword.
    BracketOpen,
}

/// The low bits of the rollout's codes.
#[derive(Clone, Copy)]
pub enum Guide<'a> {
    /// None were recorded: values round to nearest under the recorded scales.
    None,
    /// `.0` (1..=4) bits an element, in a byte each, `k` a row.
    Codes(u32, &'a [u8]),
    /// `.0` (1..=4) bits an element, packed, [`low_bytes`] a row.
    Packed(u32, &'a [u8]),
}

impl Guide<'_> {
    pub(crate) fn bits(&self) -> u32 {
        match self {
            Guide::None => 0,
            Guide::Codes(bits, _) | Guide::Packed(bits, _) => *bits,
        }
    }
}

/// What the rollout left: low bits and block scales.
#[derive(Clone, Copy)]
pub struct Record<'a> {
    /// Low bits of the codes.
    pub guide: Guide<'a>,
    /// Scale bytes, ceil(k/block) a row; the NaN of the format (0x7F, 0xFF) marks a block without a record.
    pub scales: &'a [u8],
    /// What grid values do.
    pub rounding: Rounding,
}

const GRID: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
const SIX: u32 = 0x40C0_0000;
/// Sign, exponent and three mantissa bits stay: every grid value and every midpoint of a class fits in those.
const SHIFT: u32 = 20;
/// Cells of |z|: zero; all up to 0.25, which are alike; then in turn a value of four bits and the gap above it.
const QUARTER: u32 = 0x3E80_0000 >> SHIFT;
const CELLS: usize = 2 * ((SIX >> SHIFT) - QUARTER) as usize + 3;

/// Entries of a rule: a power of two, so that a masked index needs no check.
const LENGTH: usize = (CELLS << 4).next_power_of_two();

/// What z rounds to, relative to its sign, by cell of |z| and low bits.
struct Rule {
    bits: u32,
    values: [f32; LENGTH],
}

impl Rule {
    /// The rule for `bits` (1..=4) low bits.
    fn get(bits: u32, rounding: Rounding) -> &'static Rule {
        static RULES: [OnceLock<Rule>; 8] = [const { OnceLock::new() }; 8];
        let open = rounding == Rounding::BracketOpen;
        RULES[(bits as usize - 1) * 2 + usize::from(open)].get_or_init(|| {
            let mut values = [0.0; LENGTH];
            for cell in 0..CELLS as u32 {
                let point = match cell {
                    0 => 0.0,
                    1 => 0.125,
                    _ => f32::from_bits(((QUARTER + (cell - 2) / 2) << SHIFT) + (cell & 1)),
                };
                for code in 0..1u32 << bits {
                    values[(cell << 4 | code) as usize] = rule(point, code, bits, open);
                }
            }
            Rule { bits, values }
        })
    }

    #[inline(always)]
    fn round(&self, z: f32, code: u8, open: bool) -> f32 {
        let z = if z.is_nan() { 6.0 } else { z };
        // The sign of -0 is +, once the bracket is open on both sides.
        let bits = if open { z + 0.0 } else { z }.to_bits();
        let magnitude = (bits & MAGNITUDE).min(SIX);
        let low = u32::from(code) & ((1 << self.bits) - 1);
        // Of four bits the last says whether the signs differ.
        let low = if self.bits == 4 { low ^ (bits >> 28 & 8) } else { low };
        let pair = (magnitude >> SHIFT) + ((magnitude + ((1 << SHIFT) - 1)) >> SHIFT);
        let cell = if magnitude == 0 { 0 } else { pair.max(2 * QUARTER - 1) - (2 * QUARTER - 2) };
        let q = self.values[(cell << 4 | low) as usize & (LENGTH - 1)];
        f32::from_bits(q.to_bits() ^ (bits & SIGN))
    }
}

/// q* for z = a >= 0 and low bits `code`; of four bits, bit 3 set means that the codeword is negative.
fn rule(a: f32, code: u32, bits: u32, open: bool) -> f32 {
    let nearest = |values: &mut dyn Iterator<Item = f32>, key: &dyn Fn(f32) -> (f32, bool)| {
        values.fold(None, |best: Option<f32>, v| match best {
            Some(b) if key(b) <= key(v) => Some(b),
            _ => Some(v),
        })
    };
    let below = GRID.into_iter().rfind(|&m| m <= a).expect("zero is on the grid");
    let mut above = GRID.into_iter().find(|&m| m >= a).expect("a is at most six");
    let target = if bits == 4 {
        GRID[(code & 7) as usize] * if code & 8 == 0 { 1.0 } else { -1.0 }
    } else {
        let class = (0..8u32).filter(|i| i & ((1 << bits) - 1) == code).map(|i| GRID[i as usize]);
        let key = |m: f32| ((m - a).abs(), m != below && m != above);
        nearest(&mut class.into_iter(), &key).expect("a class has members")
    };
    if open && below == above && target != above {
        let signed = GRID.into_iter().chain(GRID.into_iter().map(|m| -m));
        let mut towards = signed.filter(|m| (m - a) * (target - a) > 0.0);
        above = nearest(&mut towards, &|m| ((m - a).abs(), false)).expect("the target is one");
    }
    if (above - target).abs() < (below - target).abs() {
        above
    } else {
        below
    }
}

dispatched! {
    /// Guided quantise-dequantise; arguments have the lengths that the shape asks for.
    fn guided<C: ByteChain>(
        x: Values<'_>, record: Record<'_>, shape: Shape, global: Global<'_>, out: &mut ValuesMut<'_>,
        work: &mut Work,
    ) = guided_rows
}

/// E2M1 codes under byte scales: what a record can guide.
pub(crate) trait ByteChain: Chain<Scale = u8> {}
impl<C: Chain<Scale = u8>> ByteChain for C {}

#[inline(always)]
fn guided_rows<C: ByteChain>(
    x: Values<'_>,
    record: Record<'_>,
    shape: Shape,
    global: Global<'_>,
    out: &mut ValuesMut<'_>,
    work: &mut Work,
) {
    let shape = shape.flattened::<C>(global);
    let bits = record.guide.bits();
    let open = record.rounding == Rounding::BracketOpen;
    let rule = (bits > 0).then(|| Rule::get(bits, record.rounding));
    for row in 0..shape.rows {
        let chain = C::new(global_of(global, row), x.dtype());
        let scales = &record.scales[row * shape.scales::<C>()..][..shape.scales::<C>()];
        for (at, n) in pieces(shape.k) {
            let blocks = n.div_ceil(C::BLOCK);
            let scales = &scales[at / C::BLOCK..][..blocks];
            load(work.isa, x, row * shape.k + at, n, blocks * C::BLOCK, &mut work.x);
            if scales.contains(&C::MISSING) {
                own_scale(chain, blocks, n, work);
            }
            match record.guide {
                Guide::None => {}
                Guide::Codes(_, codes) => work.codes[..n].copy_from_slice(&codes[row * shape.k + at..][..n]),
                Guide::Packed(_, low) => {
                    let row = &low[row * low_bytes(shape.k, bits)..];
                    let row = &row[low_bytes(at, bits)..low_bytes(at + n, bits)];
                    unpack(work.isa, row, bits, &mut work.codes[..n]);
                }
            }
            let sources = work.x[..n].chunks(C::BLOCK).zip(work.codes.chunks(C::BLOCK));
            let blocks = work.values[..n].chunks_mut(C::BLOCK).zip(sources).zip(scales);
            for ((values, (x, codes)), &scale) in blocks {
                if scale == C::MISSING {
                    continue;
                }
                let (factor, (a, b)) = (chain.factor(scale, 0.0), chain.weights(scale));
                for ((value, &x), &code) in values.iter_mut().zip(x).zip(codes) {
                    let z = C::normalise(x, factor);
                    let q = match rule {
                        Some(rule) => rule.round(z, code, open),
                        None => C::Element::rounded(C::Element::code(z), x),
                    };
                    *value = (q * a) * b;
                }
            }
            store(work.isa, out, row * shape.k + at, &work.values[..n]);
        }
    }
}

/// Values of every block under its own scale, for those that have no record.
#[inline(always)]
fn own_scale<C: ByteChain>(chain: C, blocks: usize, n: usize, work: &mut Work) {
    let mut own = [0; CHUNK / 16];
    block_maxima(work.isa, &work.x, C::BLOCK, &mut work.amax[..blocks]);
    chain.encode(work, blocks, &mut own[..blocks]);
    work.dequantise(chain, &own, n);
}
