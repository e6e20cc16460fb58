//! Datasets in object stores.
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use tracekit_guidance::segment::Access;
use tracekit_guidance::{Dataset, Error, Result};

#[cfg(feature = "object-store")]
use tracekit_guidance::object::{self, Options};

#[cfg(not(feature = "object-store"))]
fn lacking(url: &str) -> Error {
    Error::Unsupported(format!("{url}: this build lacks object stores; build tracekit with the feature object-store"))
}

/// Opens a folder, or what a url names.
pub fn open(place: &str, access: Access, listed: bool, gap: u64, retries: usize) -> Result<Dataset> {
    #[cfg(feature = "object-store")]
    if object::is_url(place) {
        return object::open(place, Options { gap, retries });
    }
    #[cfg(not(feature = "object-store"))]
    if place.contains("://") {
        let _ = (gap, retries);
        return Err(lacking(place));
    }
    match listed {
        true => Dataset::open_listed(place.as_ref(), access),
        false => Dataset::open_with(place.as_ref(), access),
    }
}

/// Copies a folder's sealed segments to an object store, the manifest last.
#[cfg(feature = "object-store")]
#[pyfunction]
pub fn publish<'py>(py: Python<'py>, dir: PathBuf, url: &str, retries: usize) -> PyResult<Bound<'py, PyDict>> {
    if !object::is_url(url) {
        let text = format!("'{url}' is no object store: use s3://bucket/prefix, gs://bucket/prefix or file:///folder");
        return Err(crate::convert::raise(py, Error::Usage(text)));
    }
    let options = Options { retries, ..Options::default() };
    let done = py.detach(|| object::publish(&dir, url, options)).map_err(|e| crate::convert::raise(py, e))?;
    let d = PyDict::new(py);
    d.set_item("number", done.number)?;
    d.set_item("segments", done.segments)?;
    d.set_item("uploaded", done.uploaded)?;
    d.set_item("bytes", done.bytes)?;
    d.set_item("unsealed", done.unsealed)?;
    Ok(d)
}

/// The same of a build without object stores.
#[cfg(not(feature = "object-store"))]
#[pyfunction]
pub fn publish<'py>(py: Python<'py>, dir: PathBuf, url: &str, retries: usize) -> PyResult<Bound<'py, PyDict>> {
    let _ = (dir, retries);
    Err(crate::convert::raise(py, lacking(url)))
}
