//! PyO3 bindings: `tracekit._core`.
mod array;
mod convert;
mod manifest;
mod numerics;
mod object;
mod reader;
mod slots;
mod writer;

use pyo3::prelude::*;

/// CRC32C of bytes.
#[pyfunction]
fn crc32c(data: &Bound<'_, PyAny>) -> PyResult<u32> {
    let data = convert::Buffer::<u8>::get(data, "data")?;
    Ok(tracekit_guidance::crc32c(data.slice()))
}

/// Tokens of `[start, stop)` of a trajectory that are audited: one in `every`.
#[pyfunction]
#[pyo3(signature = (id, start, stop, every = tracekit_guidance::audit::EVERY))]
fn audit_tokens(id: &str, start: u32, stop: u32, every: u32) -> Vec<u32> {
    (start..stop).filter(|t| tracekit_guidance::audit::sampled(id, *t, every)).collect()
}

/// The native core of tracekit.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<writer::Writer>()?;
    m.add_class::<writer::Commit>()?;
    m.add_class::<reader::Reader>()?;
    m.add_class::<slots::SlotStore>()?;
    m.add_class::<slots::Found>()?;
    m.add_function(wrap_pyfunction!(audit_tokens, m)?)?;
    m.add_function(wrap_pyfunction!(crc32c, m)?)?;
    m.add_function(wrap_pyfunction!(reader::verify, m)?)?;
    m.add_function(wrap_pyfunction!(reader::recover, m)?)?;
    m.add_function(wrap_pyfunction!(manifest::commit_manifest, m)?)?;
    m.add_function(wrap_pyfunction!(manifest::latest_manifest, m)?)?;
    m.add_function(wrap_pyfunction!(object::publish, m)?)?;
    numerics::register(m)?;
    Ok(())
}
