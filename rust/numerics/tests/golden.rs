//! Vectors that independent libraries agree on, and what libraries made of fixed bf16 tensors (`tests/golden`).
use serde_json::Value;
use tracekit_numerics::*;

fn read(name: &str) -> Value {
    let path = format!("{}/../../tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))).unwrap()
}

fn isas() -> Vec<Isa> {
    std::iter::once(Isa::Portable).chain(Isa::avx2()).collect()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn numbers(list: &Value) -> Vec<f32> {
    let number = |v: &Value| match v.as_str() {
        Some(text) => text.parse::<f64>().unwrap() as f32,
        None => v.as_f64().unwrap() as f32,
    };
    list.as_array().unwrap().iter().map(number).collect()
}

fn quantise(isa: Isa, profile: Profile, x: Values<'_>, k: usize, global: Global<'_>) -> (Vec<u8>, Vec<u8>) {
    let rows = x.len() / k;
    let mut packed = vec![0; rows * profile.packed_bytes(k)];
    let mut scales = vec![0; rows * profile.scales(k)];
    let outputs = Outputs { packed: Some(&mut packed), scales: Some(ScalesMut::Bytes(&mut scales)), ..Outputs::none() };
    Quantizer::with_isa(profile, isa).quantize(x, k, global, outputs).unwrap();
    (packed, scales)
}

#[test]
fn nvfp4_exact_vectors() {
    for vector in read("vectors_nvfp4.json").as_array().unwrap() {
        let x: Vec<f32> = vector["x"].as_array().unwrap().iter().flat_map(numbers).collect();
        let packed: Vec<u8> = vector["packed"].as_array().unwrap().iter().flat_map(bytes).collect();
        let scales: Vec<f32> = numbers(&vector["expect"]["sf"]);
        let global = Global::One(vector["g"].as_f64().unwrap() as f32);
        for isa in isas() {
            let found = quantise(isa, Profile::Nvfp4Exact, Values::F32(&x), 16, global);
            assert_eq!(found.0, packed, "{} codes", vector["id"]);
            assert_eq!(found.1.iter().map(|&s| f32::from(s)).collect::<Vec<_>>(), scales, "{}", vector["id"]);
            let mut values = vec![0f32; x.len()];
            let out = ValuesMut::F32(&mut values);
            let quantizer = Quantizer::with_isa(Profile::Nvfp4Exact, isa);
            quantizer.dequantize(&found.0, Scales::Bytes(&found.1), 16, global, out).unwrap();
            assert_eq!(values, numbers(&vector["dequant"]), "{}", vector["id"]);
        }
    }
}

#[test]
fn mxfp4_rceil_vectors() {
    for vector in read("vectors_mxfp4.json").as_array().unwrap() {
        let x = numbers(&vector["x"]);
        let expected = &vector["results"]["flashinfer rceil"];
        for isa in isas() {
            let (packed, scales) = quantise(isa, Profile::Mxfp4Rceil, Values::F32(&x), x.len(), Global::None);
            assert_eq!(scales[0].to_string(), expected["e8m0"].as_str().unwrap(), "{}", vector["id"]);
            let codes: String = packed.iter().flat_map(|b| [b & 15, b >> 4]).map(|c| format!("{c:x}")).collect();
            assert!(codes.starts_with(expected["codes"].as_str().unwrap()), "{} {codes}", vector["id"]);
        }
    }
}

#[test]
fn other_libraries_bytes() {
    let golden = read("libraries.json");
    let k = golden["shape"][1].as_u64().unwrap() as usize;
    let mut seen = 0;
    for case in golden["cases"].as_array().unwrap() {
        let profile: Profile = case["profile"].as_str().unwrap().parse().unwrap();
        let x: Vec<u16> = bytes(&golden["inputs"][case["input"].as_str().unwrap()])
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .collect();
        let global = case["global_scale"].as_array().map(|_| numbers(&case["global_scale"]));
        let global = match global.as_deref() {
            None => Global::None,
            Some([g]) => Global::One(*g),
            Some(rows) => Global::Rows(rows),
        };
        let library = case["library"].as_str().unwrap();
        // These write code 0 for an exact -0.0; the hardware instruction, and we, write 8.
        let minus_zero_is_zero = library.starts_with("transformer_engine") || library.starts_with("fouroversix");
        // Its errors are q s amax / 1536 against x instead of q s against x g: one block is a near tie, and falls apart.
        let near_tie = library.starts_with("fouroversix") && case["input"] == "zeros";
        let (their_codes, their_scales) = (bytes(&case["codes"]), bytes(&case["scales"]));
        for isa in isas() {
            let (packed, scales) = quantise(isa, profile, Values::Bf16(&x), k, global);
            let blocks = scales.len() / (x.len() / k);
            for (i, (ours, theirs)) in scales.iter().zip(&their_scales).enumerate() {
                let expected = if near_tie && i == 9 * blocks + 7 { 116 } else { *ours };
                assert_eq!(expected, *theirs, "{library} {profile} {} scale {i}", case["input"]);
            }
            for (i, x) in x.iter().enumerate() {
                let code = |bytes: &[u8]| {
                    if profile.bits() == 8 {
                        return bytes[i];
                    }
                    let code = bytes[i / 2] >> (4 * (i % 2)) & 15;
                    if minus_zero_is_zero && *x == 0x8000 {
                        return code & 7;
                    }
                    code
                };
                if near_tie && i / 16 == 9 * blocks + 7 {
                    continue;
                }
                assert_eq!(code(&packed), code(&their_codes), "{library} {profile} {} code {i}", case["input"]);
            }
        }
        seen += 1;
    }
    assert!(seen >= 40, "only {seen} cases");
}
