//! Errors and buffers between Python and Rust.
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracekit_guidance::Error;

/// A `tracekit.errors.DataError`, or a `ValueError` for arguments that do not fit.
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    if let Error::Usage(text) = error {
        return PyValueError::new_err(text);
    }
    let make = || -> PyResult<PyErr> {
        let class = match error {
            Error::Full(_) => py.import("tracekit.guidance.writer")?.getattr("QueueFullError")?,
            _ => py.import("tracekit.errors")?.getattr("DataError")?,
        };
        Ok(PyErr::from_value(class.call1((error.to_string(),))?))
    };
    make().unwrap_or_else(|e| e)
}

/// A C-contiguous buffer that is kept alive and read, or written, without the GIL.
pub struct Buffer<T: Element>(PyBuffer<T>);

impl<T: Element + Sync> Buffer<T> {
    /// The buffer of `object`; an error names it `what`.
    pub fn get(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let buffer = PyBuffer::<T>::get(object).map_err(|e| PyValueError::new_err(format!("{what}: {e}")))?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err(format!(
                "{what} is not C-contiguous: pass numpy.ascontiguousarray of it"
            )));
        }
        Ok(Buffer(buffer))
    }

    /// The elements.
    pub fn slice(&self) -> &[T] {
        if self.0.item_count() == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, of type T, and `self` keeps it exported, so it cannot be resized.
        // Python code that writes to it during a call gets torn rows, never a crash.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<T>(), self.0.item_count()) }
    }

    /// The elements, to be written.
    pub fn slice_mut(&mut self) -> PyResult<&mut [T]> {
        if self.0.readonly() {
            return Err(PyValueError::new_err("output array is read-only"));
        }
        if self.0.item_count() == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above; the caller passes distinct output arrays.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<T>(), self.0.item_count()) })
    }
}

/// Little-endian bytes of fp32 values.
pub fn f32_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: any f32 is 4 initialised bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), std::mem::size_of_val(values)) }
}

/// The same, to be written.
pub fn f32_bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: any 4 bytes are an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), std::mem::size_of_val(values)) }
}
