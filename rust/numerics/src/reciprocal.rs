//! `rcp.approx.ftz.f32` of an sm_90 GPU: the correctly rounded reciprocal and a measured table of ulps.
use std::sync::OnceLock;

use crate::scale::{INFINITY_BITS, SIGN};

/// Two bits a mantissa, 2^23 of them, the first in the low bits: the difference in ulps, plus one.
static PACKED: &[u8] = include_bytes!("../data/rcp_sm90.zst");
const LENGTH: usize = 1 << 21;

fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let bytes = zstd::bulk::decompress(PACKED, LENGTH).expect("the compiled-in table is whole");
        assert_eq!(bytes.len(), LENGTH, "the compiled-in table is whole");
        bytes
    })
}

/// `rcp.approx.ftz.f32` as measured on one H200 for every mantissa; subnormal arguments and results are zeros.
///
/// On 13.2 % of the mantissas it is one ulp off the correctly rounded reciprocal. Whether other architectures share
/// the table has not been checked.
pub fn approximate_reciprocal(x: f32) -> f32 {
    let bits = x.to_bits();
    let zero = f32::from_bits(bits & SIGN);
    let exact = 1.0 / if bits & INFINITY_BITS == 0 { zero } else { x };
    if !exact.is_finite() {
        return exact;
    }
    if exact.to_bits() & INFINITY_BITS == 0 {
        return zero;
    }
    let mantissa = (bits & 0x7F_FFFF) as usize;
    let ulps = u32::from(table()[mantissa >> 2] >> (2 * (mantissa & 3)) & 3);
    f32::from_bits(exact.to_bits() + ulps - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_the_measurement() {
        let mut counts = [0u32; 4];
        for byte in table() {
            for shift in [0, 2, 4, 6] {
                counts[usize::from(byte >> shift & 3)] += 1;
            }
        }
        assert_eq!(counts, [374_723, (1 << 23) - 374_723 - 733_799, 733_799, 0]);
    }

    #[test]
    fn specials() {
        assert_eq!(approximate_reciprocal(0.0), f32::INFINITY);
        assert_eq!(approximate_reciprocal(-1e-40), f32::NEG_INFINITY);
        assert_eq!(approximate_reciprocal(f32::INFINITY).to_bits(), 0);
        assert_eq!(approximate_reciprocal(-3e38).to_bits(), SIGN);
        assert!(approximate_reciprocal(f32::NAN).is_nan());
        assert_eq!(approximate_reciprocal(2.612_244_8).to_bits(), (1f32 / 2.612_244_8).to_bits() + 1);
    }
}
