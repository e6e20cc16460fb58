use crate::chain::{self, CompressedTensors, Exact, Fast, FourOverSix, Fp8Row, Int4Group, Int8Row, ModelOpt, TorchAo};
use crate::error::{expect_len, Error};
use crate::guide::{guided, Guide, Record};
use crate::isa::Isa;
use crate::kernel::Work;
use crate::pack::low_bytes;
use crate::profile::{GlobalKind, Profile, ScaleFormat};
use crate::rows::{dequantize, quantize, Shape};
use crate::values::{Global, Outputs, Scales, ScalesMut, Values, ValuesMut};

type Rceil = chain::Mx<32, { chain::RCEIL }, 0, false, true>;
type Floor = chain::Mx<32, { chain::FLOOR }, 0, false, true>;
type Even = chain::Mx<32, { chain::EVEN }, 0, false, true>;
type Pool = chain::Mx<16, { chain::RCEIL }, 94, true, false>;

/// Calls a function generic over the chain of `$profile`; `$other` for profiles whose codes are not E2M1.
macro_rules! with_e2m1_chain {
    ($profile:expr, $f:ident $args:tt, $other:expr) => {
        match $profile {
            Profile::Nvfp4Exact => $f::<Exact> $args,
            Profile::Nvfp4Fast => $f::<Fast> $args,
            Profile::Nvfp4FourOverSix | Profile::Nvfp4FourOverSix256 => $f::<FourOverSix<false>> $args,
            Profile::Nvfp4FourOverSixMae | Profile::Nvfp4FourOverSixMae256 => $f::<FourOverSix<true>> $args,
            Profile::Nvfp4ModelOpt => $f::<ModelOpt> $args,
            Profile::Nvfp4TorchAo => $f::<TorchAo> $args,
            Profile::Nvfp4Ct => $f::<CompressedTensors> $args,
            Profile::Mxfp4Rceil => $f::<Rceil> $args,
            Profile::Mxfp4Floor => $f::<Floor> $args,
            Profile::Mxfp4Even => $f::<Even> $args,
            Profile::KvMx16 => $f::<Pool> $args,
            _ => $other,
        }
    };
}

/// Calls a function generic over the chain of `$profile`.
macro_rules! with_chain {
    ($profile:expr, $f:ident $args:tt) => {
        with_e2m1_chain!($profile, $f $args, match $profile {
            Profile::Int8 => $f::<Int8Row<false>> $args,
            Profile::Int8Rtz => $f::<Int8Row<true>> $args,
            Profile::Int4G128 => $f::<Int4Group> $args,
            Profile::Fp8E4m3 => $f::<Fp8Row<false>> $args,
            Profile::Fp8E4m3Rtz => $f::<Fp8Row<true>> $args,
            _ => $f::<chain::Mxfp8> $args,
        })
    };
}

/// A profile, compiled for a processor.
///
/// All operations take rows of `k` elements. NaN is ignored by a block's maximum and has code +6 (E2M1), NaN (E4M3)
/// or 0 (integers); an infinity saturates its block's scale; a last block shorter than the profile's is quantised over
/// the elements it has.
#[derive(Debug, Clone, Copy)]
pub struct Quantizer {
    profile: Profile,
    isa: Isa,
}

impl Quantizer {
    /// The quantiser of `profile` in the fastest instructions of this processor.
    pub fn new(profile: Profile) -> Self {
        Quantizer { profile, isa: Isa::best() }
    }

    /// The same in other instructions: equal bytes, another speed.
    pub fn with_isa(profile: Profile, isa: Isa) -> Self {
        Quantizer { profile, isa }
    }

    /// Quantises `x`, rows of `k`, and writes the outputs that are wanted, in one pass.
    ///
    /// # Errors
    /// A slice whose length is not the shape's, a missing global scale, scales of the wrong kind, low bits of an
    /// eight-bit or integer profile.
    pub fn quantize(&self, x: Values<'_>, k: usize, global: Global<'_>, mut out: Outputs<'_>) -> Result<(), Error> {
        let shape = self.shape(x.len(), k, global)?;
        if let Some(packed) = &out.packed {
            expect_len("packed", packed.len(), shape.rows * self.profile.packed_bytes(k))?;
        }
        match &out.scales {
            Some(ScalesMut::Bytes(s)) => self.check_scales(s.len(), shape, false)?,
            Some(ScalesMut::F32(s)) => self.check_scales(s.len(), shape, true)?,
            None => {}
        }
        if let Some((bits, low)) = &out.low {
            self.check_bits(*bits, 1)?;
            expect_len("low", low.len(), shape.rows * low_bytes(k, *bits))?;
        }
        if let Some(values) = &out.values {
            expect_len("values", values.len(), x.len())?;
        }
        with_chain!(self.profile, quantize(self.isa, x, shape, global, &mut out, &mut Work::new(self.isa)));
        Ok(())
    }

    /// Values of packed codes, rows of `k`, under their scales.
    ///
    /// # Errors
    /// A slice whose length is not the shape's, a missing global scale, scales of the wrong kind.
    pub fn dequantize(
        &self,
        packed: &[u8],
        scales: Scales<'_>,
        k: usize,
        global: Global<'_>,
        mut out: ValuesMut<'_>,
    ) -> Result<(), Error> {
        let shape = self.shape(out.len(), k, global)?;
        expect_len("packed", packed.len(), shape.rows * self.profile.packed_bytes(k))?;
        match scales {
            Scales::Bytes(s) => self.check_scales(s.len(), shape, false)?,
            Scales::F32(s) => self.check_scales(s.len(), shape, true)?,
        }
        with_chain!(
            self.profile,
            dequantize(self.isa, packed, scales, shape, global, &mut out, &mut Work::new(self.isa))
        );
        Ok(())
    }

    /// Quantises and dequantises `x`, rows of `k`, under a rollout's record (TRACE, Algorithm 1).
    ///
    /// A block whose scale byte is its format's NaN has no record: nearest, under its own scale.
    ///
    /// # Errors
    /// A slice whose length is not the shape's, a missing global scale, a profile whose codes are not E2M1.
    pub fn guided_round(
        &self,
        x: Values<'_>,
        k: usize,
        record: Record<'_>,
        global: Global<'_>,
        mut out: ValuesMut<'_>,
    ) -> Result<(), Error> {
        let shape = self.shape(x.len(), k, global)?;
        expect_len("output", out.len(), x.len())?;
        self.check_bits(record.guide.bits(), 0)?;
        self.check_scales(record.scales.len(), shape, false)?;
        match record.guide {
            Guide::None => {}
            Guide::Codes(_, codes) => expect_len("codes", codes.len(), x.len())?,
            Guide::Packed(bits, low) => expect_len("low", low.len(), shape.rows * low_bytes(k, bits))?,
        }
        with_e2m1_chain!(
            self.profile,
            guided(self.isa, x, record, shape, global, &mut out, &mut Work::new(self.isa)),
            {}
        );
        Ok(())
    }

    fn shape(&self, elements: usize, k: usize, global: Global<'_>) -> Result<Shape, Error> {
        let rows = elements.checked_div(k).unwrap_or(0);
        if rows * k != elements {
            return Err(Error::Shape(format!("{elements} elements are not rows of {k}")));
        }
        if self.profile.global() != GlobalKind::None {
            match global {
                Global::None => return Err(Error::Config(format!("{} needs a global scale", self.profile))),
                Global::Rows(g) if elements > 0 => expect_len("global_scale", g.len(), rows)?,
                _ => {}
            }
        }
        Ok(Shape { rows, k })
    }

    fn check_scales(&self, found: usize, shape: Shape, f32s: bool) -> Result<(), Error> {
        if f32s != (self.profile.scale_format() == ScaleFormat::F32) {
            let kind = if f32s { "bytes" } else { "fp32" };
            return Err(Error::Config(format!("scales of {} are {kind}", self.profile)));
        }
        expect_len("scales", found, shape.rows * self.profile.scales(shape.k))
    }

    fn check_bits(&self, bits: u32, least: u32) -> Result<(), Error> {
        if !(least..=4).contains(&bits) {
            return Err(Error::Config(format!("bits must be {least}..4, not {bits}")));
        }
        if self.profile.bits() != 4 || self.profile.scale_format() == ScaleFormat::F32 {
            return Err(Error::Config(format!("low bits are defined over E2M1 codes, not for {}", self.profile)));
        }
        Ok(())
    }
}
