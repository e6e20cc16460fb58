//! Every profile: the portable build and the AVX2 one agree; outputs agree with each other; E2M1 chains agree with a
//! rounding by exact distances.
use proptest::prelude::*;
use tracekit_numerics::*;

/// Everything that a quantiser says about rows of fp32 values.
#[derive(Debug, PartialEq)]
struct All {
    packed: Vec<u8>,
    scales: Vec<u8>,
    low: Vec<Vec<u8>>,
    values: Vec<u32>,
}

fn everything(quantizer: Quantizer, profile: Profile, x: Values<'_>, k: usize, global: Global<'_>) -> All {
    let rows = x.len().checked_div(k).unwrap_or(0);
    let mut out = All {
        packed: vec![0xAA; rows * profile.packed_bytes(k)],
        scales: vec![],
        low: vec![],
        values: vec![0; x.len()],
    };
    let mut bytes = vec![0xAA; rows * profile.scales(k)];
    let mut wide = vec![f32::NAN; rows * profile.scales(k)];
    let mut values = vec![0f32; x.len()];
    let f32s = profile.scale_format() == ScaleFormat::F32;
    let scales = if f32s { ScalesMut::F32(&mut wide) } else { ScalesMut::Bytes(&mut bytes) };
    let outputs = Outputs {
        packed: Some(&mut out.packed),
        scales: Some(scales),
        values: Some(ValuesMut::F32(&mut values)),
        low: None,
    };
    quantizer.quantize(x, k, global, outputs).unwrap();
    // NaN payloads are the processor's business.
    out.values = values.iter().map(|v| if v.is_nan() { 0x7FC0_0000 } else { v.to_bits() }).collect();
    out.scales = if f32s { wide.iter().flat_map(|v| v.to_le_bytes()).collect() } else { bytes };
    if profile.bits() == 4 && !f32s {
        for bits in 1..=4 {
            let mut low = vec![0xAA; rows * low_bytes(k, bits)];
            let outputs = Outputs { low: Some((bits, &mut low)), ..Outputs::none() };
            quantizer.quantize(x, k, global, outputs).unwrap();
            out.low.push(low);
        }
    }
    out
}

fn codes(packed: &[u8], k: usize, bits: u32) -> Vec<u8> {
    let bytes = low_bytes(k, bits);
    let at = |row: &[u8], j: usize| {
        (0..bits as usize).fold(0, |code, i| {
            let bit = bits as usize * j + i;
            code | (row[bit / 8] >> (bit % 8) & 1) << i
        })
    };
    packed.chunks(bytes.max(1)).flat_map(|row| (0..k).map(move |j| at(row, j))).collect()
}

/// fp32 by its bits (specials included), and ordinary magnitudes.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (-8.0f32..8.0, -12i32..12).prop_map(|(m, e)| m * 2f32.powi(e)),
        2 => (-12i32..12, 0u32..8).prop_map(|(e, c)| 2f32.powi(e) * [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0][c as usize]),
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => prop::sample::select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, f32::MAX]),
    ]
}

fn matrix() -> impl Strategy<Value = (Vec<f32>, usize)> {
    (1usize..4, prop_oneof![1usize..70, 500usize..530])
        .prop_flat_map(|(rows, k)| (prop::collection::vec(value(), rows * k), Just(k)))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn instruction_sets_agree((x, k) in matrix(), g in 1e-3f32..1e5) {
        let Some(avx2) = Isa::avx2() else { return Ok(()) };
        let rows: Vec<f32> = (0..x.len() / k).map(|row| g * (1.0 + row as f32 * 0.37)).collect();
        let bf16: Vec<u16> = x.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        for profile in Profile::ALL {
            for x in [Values::F32(&x), Values::Bf16(&bf16), Values::F16(&bf16)] {
                let of = |isa| everything(Quantizer::with_isa(profile, isa), profile, x, k, Global::Rows(&rows));
                prop_assert_eq!(of(Isa::Portable), of(avx2), "{}", profile);
            }
        }
    }

    #[test]
    fn outputs_agree((x, k) in matrix(), g in 1e-3f32..1e5) {
        for profile in Profile::ALL {
            let quantizer = Quantizer::new(profile);
            let one = everything(quantizer, profile, Values::F32(&x), k, Global::One(g));
            let rows = vec![g; x.len() / k];
            prop_assert_eq!(&one, &everything(quantizer, profile, Values::F32(&x), k, Global::Rows(&rows)));
            for (bits, low) in (1..).zip(&one.low) {
                let mask = (1u8 << bits) - 1;
                let whole = codes(&one.packed, k, 4);
                prop_assert_eq!(codes(low, k, bits), whole.iter().map(|c| c & mask).collect::<Vec<_>>());
            }
            let wide: Vec<f32> = one.scales.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let f32s = profile.scale_format() == ScaleFormat::F32;
            let scales = if f32s { Scales::F32(&wide) } else { Scales::Bytes(&one.scales) };
            let mut values = vec![0f32; x.len()];
            quantizer.dequantize(&one.packed, scales, k, Global::One(g), ValuesMut::F32(&mut values)).unwrap();
            for (i, (v, &bits)) in values.iter().zip(&one.values).enumerate() {
                // Quantise-dequantise may lose the sign of a zero, and nothing else.
                let w = f32::from_bits(bits);
                prop_assert!(v == &w || (v.is_nan() && w.is_nan()), "{} element {}: {} {}", profile, i, v, w);
            }
        }
    }

    #[test]
    fn power_of_two_scales_round_by_distance(x in prop::collection::vec(-8.0f32..8.0, 32)) {
        let mut x = x;
        x[0] = 6.0;
        x[16] = -6.0;
        x.iter_mut().for_each(|v| *v = v.clamp(-6.0, 6.0));
        let grid = [0.0f64, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for profile in [Profile::Nvfp4Exact, Profile::Mxfp4Rceil, Profile::KvMx16, Profile::Mxfp4Even] {
            let all = everything(Quantizer::new(profile), profile, Values::F32(&x), 32, Global::One(1.0));
            for (code, &v) in codes(&all.packed, 32, 4).into_iter().zip(&x) {
                let distance = |c: usize| (grid[c] - f64::from(v).abs()).abs();
                let best = (0..8).map(distance).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(distance(usize::from(code & 7)), best, "{} of {}", profile, v);
                prop_assert!(code >> 3 == u8::from(v < 0.0) || v == 0.0);
            }
        }
    }

    #[test]
    fn a_whole_record_gives_the_codeword((x, k) in matrix(), g in 1e-2f32..1e3) {
        // With all four bits and the same values, guided rounding is quantise-dequantise where that is a bracket member.
        for profile in [Profile::Nvfp4Exact, Profile::Mxfp4Rceil] {
            let quantizer = Quantizer::new(profile);
            let all = everything(quantizer, profile, Values::F32(&x), k, Global::One(g));
            let bytes = codes(&all.packed, k, 4);
            let mut out = [vec![0f32; x.len()], vec![0f32; x.len()]];
            for (guide, out) in [Guide::Packed(4, &all.low[3]), Guide::Codes(4, &bytes)].into_iter().zip(&mut out) {
                let record = Record { guide, scales: &all.scales, rounding: Rounding::Bracket };
                quantizer.guided_round(Values::F32(&x), k, record, Global::One(g), ValuesMut::F32(out)).unwrap();
            }
            for (i, &bits) in all.values.iter().enumerate() {
                let want = f32::from_bits(bits);
                prop_assert!(out[0][i] == want || (want.is_nan() && out[0][i].is_nan()), "{} {}", profile, x[i]);
                prop_assert_eq!(out[0][i].to_bits(), out[1][i].to_bits());
            }
        }
    }
}

#[test]
fn names_come_back() {
    for profile in Profile::ALL {
        assert_eq!(profile.name().parse(), Ok(profile));
    }
    assert!(matches!("nvfp4".parse::<Profile>(), Err(Error::Config(_))));
}

#[test]
fn wrong_arguments_are_errors() {
    let x = [0f32; 32];
    let (mut short, mut scales) = ([0u8; 15], [0u8; 2]);
    let quantizer = Quantizer::new(Profile::Nvfp4Exact);
    let packed = |packed| Outputs { packed: Some(packed), ..Outputs::none() };
    let run = |g, out| quantizer.quantize(Values::F32(&x), 32, g, out);
    assert!(matches!(run(Global::One(1.0), packed(&mut short)), Err(Error::Shape(_))));
    assert!(matches!(run(Global::None, Outputs::none()), Err(Error::Config(_))));
    assert!(matches!(run(Global::Rows(&[1.0, 1.0]), Outputs::none()), Err(Error::Shape(_))));
    let wide = Outputs { scales: Some(ScalesMut::F32(&mut [0.0; 2])), ..Outputs::none() };
    assert!(matches!(run(Global::One(1.0), wide), Err(Error::Config(_))));
    assert!(matches!(quantizer.quantize(Values::F32(&x), 5, Global::One(1.0), Outputs::none()), Err(Error::Shape(_))));
    let low = Outputs { low: Some((1, &mut scales)), ..Outputs::none() };
    let int8 = Quantizer::new(Profile::Int8);
    assert!(matches!(int8.quantize(Values::F32(&x), 16, Global::None, low), Err(Error::Config(_))));
    let record = Record { guide: Guide::None, scales: &scales, rounding: Rounding::Bracket };
    let out = ValuesMut::F32(&mut [0.0; 32]);
    assert!(matches!(int8.guided_round(Values::F32(&x), 16, record, Global::None, out), Err(Error::Config(_))));
}

#[test]
fn empty_tensors() {
    for profile in Profile::ALL {
        for k in [0, 16] {
            let quantizer = Quantizer::new(profile);
            quantizer.quantize(Values::F32(&[]), k, Global::One(1.0), Outputs::none()).unwrap();
        }
    }
}
