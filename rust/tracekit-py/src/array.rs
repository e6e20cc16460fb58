//! Arrays of the caller, by the buffer protocol or DLPack.
use std::ffi::c_void;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use tracekit_numerics::{Values, ValuesMut};

pub(crate) fn usage(text: String) -> PyErr {
    PyValueError::new_err(text)
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Kind {
    F32,
    Bf16,
    F16,
    U16,
    U8,
}

impl Kind {
    pub(crate) fn size(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::U8 => 1,
            _ => 2,
        }
    }
}

/// DLPack's C structures, version 0.8 (<https://dmlc.github.io/dlpack/latest/c_api.html>).
#[repr(C)]
struct DlTensor {
    pub(crate) data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    pub(crate) shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

enum Owner {
    Buffer(#[allow(dead_code)] PyUntypedBuffer),
    DlPack(*mut DlManaged),
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Owner::DlPack(managed) = *self {
            // SAFETY: we consumed the capsule, so the structure is ours to delete, once, with the GIL held.
            unsafe {
                if let Some(deleter) = (*managed).deleter {
                    deleter(managed);
                }
            }
        }
    }
}

/// An array of the caller: kept alive, and used without the GIL.
pub(crate) struct Array {
    pub(crate) data: *mut u8,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
    readonly: bool,
    pub(crate) name: &'static str,
    _owner: Owner,
}

impl Array {
    /// The array that `object` is, under the name that errors give it.
    pub(crate) fn get(object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Array> {
        let array = match PyUntypedBuffer::get(object) {
            Ok(buffer) => Array::of_buffer(buffer, name)?,
            Err(_) if object.hasattr("__dlpack__")? => Array::of_dlpack(object, name)?,
            Err(e) => return Err(usage(format!("{name}: {e}"))),
        };
        if array.len() > 0 && array.data as usize % array.kind.size() != 0 {
            return Err(usage(format!("{name} is not aligned to its element size")));
        }
        Ok(array)
    }

    /// An output of its own type; `dtype` says what uint16 means.
    pub(crate) fn target(object: &Bound<'_, PyAny>, dtype: Option<&str>) -> PyResult<Array> {
        let array = Array::get(object, "out")?;
        if array.kind == Kind::U16 {
            array.retyped(dtype)
        } else {
            Ok(array)
        }
    }

    fn of_buffer(buffer: PyUntypedBuffer, name: &'static str) -> PyResult<Array> {
        let format = buffer.format().to_bytes();
        let kind = match format.strip_prefix(b"<").or(format.strip_prefix(b"=")).unwrap_or(format) {
            b"f" => Kind::F32,
            b"e" => Kind::F16,
            b"H" => Kind::U16,
            b"B" => Kind::U8,
            _ => return Err(usage(format!("{name}: no use for elements of format {:?}", buffer.format()))),
        };
        if !buffer.is_c_contiguous() {
            return Err(usage(format!("{name} is not C-contiguous: pass a contiguous copy")));
        }
        let (data, shape) = (buffer.buf_ptr().cast(), buffer.shape().to_vec());
        Ok(Array { data, kind, shape, readonly: buffer.readonly(), name, _owner: Owner::Buffer(buffer) })
    }

    fn of_dlpack(object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Array> {
        let capsule = object.call_method0("__dlpack__")?;
        let capsule = capsule.cast::<PyCapsule>().map_err(|e| usage(format!("{name}: {e}")))?;
        let managed = capsule.pointer_checked(Some(c"dltensor"))?.as_ptr().cast::<DlManaged>();
        // SAFETY: the capsule of that name holds such a structure; renaming it makes us its owner.
        let (owner, tensor) = unsafe {
            if pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), c"used_dltensor".as_ptr()) != 0 {
                return Err(PyErr::fetch(object.py()));
            }
            (Owner::DlPack(managed), &(*managed).tensor)
        };
        let kind = match (tensor.code, tensor.bits, tensor.lanes) {
            (2, 32, 1) => Kind::F32,
            (2, 16, 1) => Kind::F16,
            (4, 16, 1) => Kind::Bf16,
            (1, 16, 1) => Kind::U16,
            (1, 8, 1) => Kind::U8,
            other => return Err(usage(format!("{name}: no use for elements of DLPack type {other:?}"))),
        };
        if !matches!(tensor.device_type, 1 | 3) {
            return Err(usage(format!("{name} is on another device: pass .cpu() of it")));
        }
        let ndim = tensor.ndim as usize;
        // SAFETY: shape has ndim entries, and strides too unless they are absent.
        let (shape, strides) = unsafe {
            let of = |p: *mut i64| if ndim == 0 { &[][..] } else { std::slice::from_raw_parts(p, ndim) };
            (of(tensor.shape), (!tensor.strides.is_null()).then(|| of(tensor.strides)))
        };
        let mut dense = 1;
        for (&n, &stride) in shape.iter().zip(strides.unwrap_or(&[])).rev() {
            if n > 1 && stride != dense && !shape.contains(&0) {
                return Err(usage(format!("{name} is not contiguous: pass .contiguous() of it")));
            }
            dense *= n;
        }
        let shape = shape.iter().map(|&n| n as usize).collect();
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        Ok(Array { data, kind, shape, readonly: false, name, _owner: owner })
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn k(&self) -> PyResult<usize> {
        self.shape.last().copied().ok_or_else(|| usage(format!("{} has no axes", self.name)))
    }

    /// A uint16 array holds the bits of `dtype`.
    pub(crate) fn retyped(mut self, dtype: Option<&str>) -> PyResult<Array> {
        self.kind = match (self.kind, dtype) {
            (Kind::U16 | Kind::Bf16, Some("bf16")) => Kind::Bf16,
            (Kind::U16 | Kind::F16, Some("fp16")) => Kind::F16,
            (kind, None) if kind != Kind::U16 => kind,
            (Kind::F32, Some("fp32")) => Kind::F32,
            (Kind::U16, None) => return Err(usage(format!("{}: say dtype=\"bf16\" or \"fp16\"", self.name))),
            (_, Some(other)) => return Err(usage(format!("{} is not of dtype {other:?}", self.name))),
            (kind, None) => kind,
        };
        Ok(self)
    }

    pub(crate) fn slice<T>(&self, kinds: &[Kind]) -> PyResult<&[T]> {
        if !kinds.contains(&self.kind) {
            return Err(usage(format!("{} has elements of {:?}, not {kinds:?}", self.name, self.kind)));
        }
        debug_assert_eq!(std::mem::size_of::<T>(), self.kind.size());
        if self.len() == 0 {
            return Ok(&[]);
        }
        // SAFETY: contiguous, aligned, of that size, and kept alive by the owner. Python code that writes to it during
        // a call gets torn values, never a crash: any bits are a T.
        Ok(unsafe { std::slice::from_raw_parts(self.data.cast(), self.len()) })
    }

    pub(crate) fn slice_mut<T>(&mut self, kinds: &[Kind]) -> PyResult<&mut [T]> {
        if self.readonly {
            return Err(usage(format!("{} is read-only", self.name)));
        }
        let (data, len) = (self.data, self.slice::<T>(kinds)?.len());
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above; `distinct` has checked that no other argument shares the memory.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) })
    }

    pub(crate) fn values(&self) -> PyResult<Values<'_>> {
        Ok(match self.kind {
            Kind::F32 => Values::F32(self.slice(&[Kind::F32])?),
            Kind::Bf16 => Values::Bf16(self.slice(&[Kind::Bf16])?),
            _ => Values::F16(self.slice(&[Kind::F16])?),
        })
    }

    pub(crate) fn values_mut(&mut self) -> PyResult<ValuesMut<'_>> {
        Ok(match self.kind {
            Kind::F32 => ValuesMut::F32(self.slice_mut(&[Kind::F32])?),
            Kind::Bf16 => ValuesMut::Bf16(self.slice_mut(&[Kind::Bf16])?),
            _ => ValuesMut::F16(self.slice_mut(&[Kind::F16])?),
        })
    }
}

/// An error if an output shares memory with another argument.
pub(crate) fn distinct(outputs: &[&Array], inputs: &[&Array]) -> PyResult<()> {
    let range = |a: &Array| (a.data as usize, a.data as usize + a.len() * a.kind.size());
    for (i, out) in outputs.iter().enumerate() {
        for other in outputs[i + 1..].iter().chain(inputs) {
            let (a, b) = (range(out), range(other));
            if a.0 < b.1 && b.0 < a.1 {
                return Err(usage(format!("{} and {} share memory", out.name, other.name)));
            }
        }
    }
    Ok(())
}
