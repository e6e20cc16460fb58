//! Quantisers over arrays of the caller, without a copy and without the GIL.
//!
//! An array is anything with the buffer protocol (numpy, bytes, bytearray, memoryview) or DLPack (torch), C-contiguous
//! and in the host's memory. numpy has no bf16: pass its bits as uint16 with `dtype="bf16"`.
use crate::array::{distinct, usage, Array, Kind};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyFloat, PyInt, PyTuple};
use tracekit_numerics::{
    low_bytes, Error, Global, Guide, Outputs, Profile, Quantizer, Record, Rounding, ScaleFormat, Scales, ScalesMut,
};

fn raise(py: Python<'_>, error: Error) -> PyErr {
    let text = error.to_string();
    if let Error::Shape(_) = error {
        return usage(text);
    }
    let class = py.import("tracekit.errors").and_then(|m| m.getattr("ConfigError"));
    match class.and_then(|c| c.call1((text,))) {
        Ok(value) => PyErr::from_value(value),
        Err(e) => e,
    }
}

fn profile_of(py: Python<'_>, name: &str) -> PyResult<Profile> {
    name.parse().map_err(|e| raise(py, e))
}

/// A number, an fp32 array of one, or one that broadcasts against rows [..., 1].
enum GlobalScale {
    None,
    One(f32),
    Rows(Vec<f32>),
}

impl GlobalScale {
    fn get(object: Option<&Bound<'_, PyAny>>, shape: &[usize]) -> PyResult<GlobalScale> {
        let Some(object) = object else { return Ok(GlobalScale::None) };
        if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
            return Ok(GlobalScale::One(object.extract::<f64>()? as f32));
        }
        let array = Array::get(object, "global_scale")?;
        let values = array.slice::<f32>(&[Kind::F32])?;
        if values.len() == 1 {
            return Ok(GlobalScale::One(values[0]));
        }
        let fits = |(&g, &x): (&usize, &usize)| g == 1 || g == x;
        let broadcasts = array.shape.len() == shape.len() && array.shape.last() == Some(&1);
        if !broadcasts || !array.shape.iter().zip(shape).all(fits) {
            let wanted = &shape[..shape.len().saturating_sub(1)];
            return Err(usage(format!("global_scale of shape {:?} is not one a row of {wanted:?}", array.shape)));
        }
        let axes = shape.len() - 1;
        let rows: usize = shape[..axes].iter().product();
        let row_of = |row: usize| {
            let (mut rest, mut at, mut step) = (row, 0, 1);
            for axis in (0..axes).rev() {
                let n = array.shape[axis];
                at += step * if n == 1 { 0 } else { rest % shape[axis] };
                step *= n;
                rest /= shape[axis];
            }
            values[at]
        };
        Ok(GlobalScale::Rows((0..rows).map(row_of).collect()))
    }

    fn global(&self) -> Global<'_> {
        match self {
            GlobalScale::None => Global::None,
            GlobalScale::One(g) => Global::One(*g),
            GlobalScale::Rows(g) => Global::Rows(g),
        }
    }
}

/// The caller's array, or a bytearray of that many zeros.
fn output<'py>(
    py: Python<'py>,
    given: Option<Bound<'py, PyAny>>,
    bytes: usize,
    name: &'static str,
) -> PyResult<(Bound<'py, PyAny>, Array)> {
    let object = match given {
        Some(object) => object,
        None => PyByteArray::new_with(py, bytes, |_| Ok(()))?.into_any(),
    };
    let array = Array::get(&object, name)?;
    Ok((object, array))
}

/// Scales are bytes of E4M3 or E8M0, or fp32 (also as their bytes).
fn scales_kind(array: &mut Array, profile: Profile) {
    if profile.scale_format() == ScaleFormat::F32 && array.kind == Kind::U8 && array.data as usize % 4 == 0 {
        let bytes = array.len();
        if bytes % 4 == 0 {
            (array.kind, array.shape) = (Kind::F32, vec![bytes / 4]);
        }
    }
}

/// Quantise x [..., K] along its last axis and pack: (packed, scales, low).
///
/// `packed` [..., ceil(K/2)] two codes a byte (eight-bit codes as they are), `scales` [..., ceil(K/block)] bytes or
/// fp32, `low` the low `bits` bits of each code, rows padded to a byte (None for bits=0). Each is the array passed
/// under that name, or a new bytearray.
#[pyfunction]
#[pyo3(signature = (x, profile, *, global_scale=None, bits=0, dtype=None, packed=None, scales=None, low=None))]
#[allow(clippy::too_many_arguments)]
pub fn quantize_pack<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    profile: &str,
    global_scale: Option<&Bound<'py, PyAny>>,
    bits: u32,
    dtype: Option<&str>,
    packed: Option<Bound<'py, PyAny>>,
    scales: Option<Bound<'py, PyAny>>,
    low: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyTuple>> {
    let profile = profile_of(py, profile)?;
    let x = Array::get(x, "x")?.retyped(dtype)?;
    let k = x.k()?;
    let rows = x.len().checked_div(k).unwrap_or(0);
    let global = GlobalScale::get(global_scale, &x.shape)?;
    let width = if profile.scale_format() == ScaleFormat::F32 { 4 } else { 1 };
    let (packed_object, mut packed) = output(py, packed, rows * profile.packed_bytes(k), "packed")?;
    let (scales_object, mut scales) = output(py, scales, rows * profile.scales(k) * width, "scales")?;
    scales_kind(&mut scales, profile);
    let low_bits = if bits > 0 { Some(output(py, low, rows * low_bytes(k, bits), "low")?) } else { None };
    let (low_object, mut low) = low_bits.map_or((None, None), |(o, a)| (Some(o), Some(a)));
    let outputs: Vec<&Array> = [Some(&packed), Some(&scales), low.as_ref()].into_iter().flatten().collect();
    distinct(&outputs, &[&x])?;
    let outputs = Outputs {
        packed: Some(packed.slice_mut(&[Kind::U8])?),
        scales: Some(match width {
            4 => ScalesMut::F32(scales.slice_mut(&[Kind::F32])?),
            _ => ScalesMut::Bytes(scales.slice_mut(&[Kind::U8])?),
        }),
        low: low.as_mut().map(|low| PyResult::Ok((bits, low.slice_mut(&[Kind::U8])?))).transpose()?,
        values: None,
    };
    let (values, global) = (x.values()?, global.global());
    let done = py.detach(|| Quantizer::new(profile).quantize(values, k, global, outputs));
    done.map_err(|e| raise(py, e))?;
    PyTuple::new(py, [Some(packed_object), Some(scales_object), low_object])
}

/// Quantise and dequantise x [..., K] into `out`, of x's shape and any of the three types.
#[pyfunction]
#[pyo3(signature = (x, profile, out, *, global_scale=None, dtype=None))]
pub fn quantize_dequantize<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    profile: &str,
    out: Bound<'py, PyAny>,
    global_scale: Option<&Bound<'py, PyAny>>,
    dtype: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let profile = profile_of(py, profile)?;
    let x = Array::get(x, "x")?.retyped(dtype)?;
    let mut result = Array::target(&out, dtype)?;
    let global = GlobalScale::get(global_scale, &x.shape)?;
    distinct(&[&result], &[&x])?;
    let outputs = Outputs { values: Some(result.values_mut()?), ..Outputs::none() };
    let (values, k, global) = (x.values()?, x.k()?, global.global());
    py.detach(|| Quantizer::new(profile).quantize(values, k, global, outputs)).map_err(|e| raise(py, e))?;
    Ok(out)
}

/// Values of `packed` codes under `scales` into `out` [..., K], whose shape and type say what they are.
#[pyfunction]
#[pyo3(signature = (packed, scales, profile, out, *, global_scale=None, dtype=None))]
pub fn dequantize<'py>(
    py: Python<'py>,
    packed: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    profile: &str,
    out: Bound<'py, PyAny>,
    global_scale: Option<&Bound<'py, PyAny>>,
    dtype: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let profile = profile_of(py, profile)?;
    let (packed, mut scales) = (Array::get(packed, "packed")?, Array::get(scales, "scales")?);
    scales_kind(&mut scales, profile);
    let mut result = Array::target(&out, dtype)?;
    let (k, global) = (result.k()?, GlobalScale::get(global_scale, &result.shape)?);
    distinct(&[&result], &[&packed, &scales])?;
    let codes = packed.slice::<u8>(&[Kind::U8])?;
    let scales = match scales.kind {
        Kind::F32 => Scales::F32(scales.slice(&[Kind::F32])?),
        _ => Scales::Bytes(scales.slice(&[Kind::U8])?),
    };
    let (values, global) = (result.values_mut()?, global.global());
    let done = py.detach(|| Quantizer::new(profile).dequantize(codes, scales, k, global, values));
    done.map_err(|e| raise(py, e))?;
    Ok(out)
}

/// Quantise and dequantise x [..., K] into `out` under a rollout's record.
///
/// `low` holds `bits` bits a code: packed rows, or with `packed=False` a byte each. `scales` are the record's bytes.
#[pyfunction]
#[pyo3(signature = (
    x, low, scales, profile, out, *, bits, global_scale=None, packed=true, rounding="bracket", dtype=None
))]
#[allow(clippy::too_many_arguments)]
pub fn guided_round<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    low: Option<&Bound<'py, PyAny>>,
    scales: &Bound<'py, PyAny>,
    profile: &str,
    out: Bound<'py, PyAny>,
    bits: u32,
    global_scale: Option<&Bound<'py, PyAny>>,
    packed: bool,
    rounding: &str,
    dtype: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let profile = profile_of(py, profile)?;
    let x = Array::get(x, "x")?.retyped(dtype)?;
    let scales = Array::get(scales, "scales")?;
    let mut result = Array::target(&out, dtype)?;
    let global = GlobalScale::get(global_scale, &x.shape)?;
    let low = match (bits, low) {
        (0, _) => None,
        (_, Some(low)) => Some(Array::get(low, "low")?),
        (_, None) => return Err(usage(format!("low is missing for bits={bits}"))),
    };
    let inputs: Vec<&Array> = [Some(&x), Some(&scales), low.as_ref()].into_iter().flatten().collect();
    distinct(&[&result], &inputs)?;
    let guide = match &low {
        None => Guide::None,
        Some(low) if packed => Guide::Packed(bits, low.slice(&[Kind::U8])?),
        Some(low) => Guide::Codes(bits, low.slice(&[Kind::U8])?),
    };
    let rounding = match rounding {
        "bracket" => Rounding::Bracket,
        "bracket_open" => Rounding::BracketOpen,
        other => {
            let text = format!("rounding must be bracket or bracket_open, not {other:?}");
            return Err(raise(py, Error::Config(text)));
        }
    };
    let record = Record { guide, scales: scales.slice(&[Kind::U8])?, rounding };
    let (values, k, global, target) = (x.values()?, x.k()?, global.global(), result.values_mut()?);
    let done = py.detach(|| Quantizer::new(profile).guided_round(values, k, record, global, target));
    done.map_err(|e| raise(py, e))?;
    Ok(out)
}

/// Adds the functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(quantize_pack, m)?)?;
    m.add_function(wrap_pyfunction!(quantize_dequantize, m)?)?;
    m.add_function(wrap_pyfunction!(dequantize, m)?)?;
    m.add_function(wrap_pyfunction!(guided_round, m)?)
}
