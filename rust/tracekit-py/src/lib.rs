//! PyO3 bindings: `tracekit._core`.
mod convert;
mod numerics;
mod reader;
mod writer;

use pyo3::prelude::*;

/// CRC32C of bytes.
#[pyfunction]
fn crc32c(data: &Bound<'_, PyAny>) -> PyResult<u32> {
    let data = convert::Buffer::<u8>::get(data, "data")?;
    Ok(tracekit_guidance::crc32c(data.slice()))
}

/// The native core of tracekit.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<writer::Writer>()?;
    m.add_class::<writer::Commit>()?;
    m.add_class::<reader::Reader>()?;
    m.add_function(wrap_pyfunction!(crc32c, m)?)?;
    m.add_function(wrap_pyfunction!(reader::verify, m)?)?;
    m.add_function(wrap_pyfunction!(reader::recover, m)?)?;
    numerics::register(m)?;
    Ok(())
}
