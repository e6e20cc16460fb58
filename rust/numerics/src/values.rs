/// Element type of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

/// Source values, row-major and contiguous.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// fp32.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
    /// The bits of fp16 values.
    F16(&'a [u16]),
}

impl Values<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(x) => x.len(),
            Values::Bf16(x) | Values::F16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Values::F32(_) => Dtype::F32,
            Values::Bf16(_) => Dtype::Bf16,
            Values::F16(_) => Dtype::F16,
        }
    }
}

/// Where values go, row-major and contiguous; rounded to nearest even from fp32.
pub enum ValuesMut<'a> {
    /// fp32.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
    /// The bits of fp16 values.
    F16(&'a mut [u16]),
}

impl ValuesMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            ValuesMut::F32(x) => x.len(),
            ValuesMut::Bf16(x) | ValuesMut::F16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The global scale, in the sense the profile has it ([`GlobalKind`](crate::GlobalKind)).
#[derive(Clone, Copy)]
pub enum Global<'a> {
    /// None, for a profile without one; a profile that has one refuses it. Others ignore whatever they get.
    None,
    /// One for all rows.
    One(f32),
    /// One for each row.
    Rows(&'a [f32]),
}

/// Block scales, row-major.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// E4M3 or E8M0 bytes.
    Bytes(&'a [u8]),
    /// fp32 scales, of the profiles that store them so.
    F32(&'a [f32]),
}

/// Where block scales go, row-major.
pub enum ScalesMut<'a> {
    /// E4M3 or E8M0 bytes.
    Bytes(&'a mut [u8]),
    /// fp32 scales.
    F32(&'a mut [f32]),
}

/// Where the results go; what is `None` is not written.
pub struct Outputs<'a> {
    /// Codes: four-bit ones two a byte (element 2j in the low nibble, ceil(k/2) bytes a row), eight-bit ones as they are.
    pub packed: Option<&'a mut [u8]>,
    /// Scales: ceil(k/block) a row.
    pub scales: Option<ScalesMut<'a>>,
    /// The low `.0` (1..=4) bits of each code, least significant first, rows padded to a byte: [`low_bytes`](crate::low_bytes) a row.
    pub low: Option<(u32, &'a mut [u8])>,
    /// Quantised and dequantised values.
    pub values: Option<ValuesMut<'a>>,
}

impl Outputs<'_> {
    /// Nothing; to fill in what is wanted.
    pub fn none() -> Self {
        Outputs { packed: None, scales: None, low: None, values: None }
    }
}
