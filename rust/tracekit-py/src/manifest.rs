//! `_core.commit_manifest` and `_core.latest_manifest`.
use crate::convert::raise;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::PathBuf;
use tracekit_guidance::manifest::{self, Manifest};

fn dict<'py>(py: Python<'py>, m: &Manifest) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("number", m.number)?;
    d.set_item("parent", m.parent)?;
    d.set_item("created_ns", m.created_ns)?;
    let mut segments = Vec::with_capacity(m.segments.len());
    for e in &m.segments {
        let s = PyDict::new(py);
        s.set_item("name", &e.name)?;
        s.set_item("uuid", PyBytes::new(py, &e.uuid))?;
        s.set_item("bytes", e.bytes)?;
        s.set_item("created_ns", e.created_ns)?;
        s.set_item("trajectories", e.trajectories)?;
        s.set_item("chunks", e.chunks)?;
        segments.push(s);
    }
    d.set_item("segments", segments)?;
    Ok(d)
}

/// Writes the next manifest of a folder and returns the newest.
#[pyfunction]
pub fn commit_manifest(py: Python<'_>, dir: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let m = py.detach(|| manifest::commit(&dir)).map_err(|e| raise(py, e))?;
    dict(py, &m)
}

/// A folder's newest manifest that holds, or None, and why newer ones do not.
#[pyfunction]
pub fn latest_manifest(py: Python<'_>, dir: PathBuf) -> PyResult<(Option<Bound<'_, PyDict>>, Vec<String>)> {
    let (found, refused) = py.detach(|| manifest::latest(&dir)).map_err(|e| raise(py, e))?;
    let found = found.map(|(m, _)| dict(py, &m)).transpose()?;
    Ok((found, refused))
}
