use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How block scales are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// A byte with four exponent and three mantissa bits.
    E4m3,
    /// A byte that is a biased power of two.
    E8m0,
    /// fp32.
    F32,
}

/// Which global scale a chain takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GlobalKind {
    /// None.
    None,
    /// The factor that brings the tensor's maximum to the range: range / amax.
    Encode,
    /// Its opposite, amax / range.
    Decode,
}

/// A quantiser by name: block length, scale format, order of operations, tie rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// TransformerEngine's NVFP4 chain: the only one that every device repeats.
    Nvfp4Exact,
    /// The GPU engines' default NVFP4 chain, with a Hopper GPU's approximate reciprocal.
    Nvfp4Fast,
    /// 4over6, squared error.
    Nvfp4FourOverSix,
    /// 4over6, absolute error.
    Nvfp4FourOverSixMae,
    /// 4over6, squared error, range 6 * 256.
    Nvfp4FourOverSix256,
    /// 4over6, absolute error, range 6 * 256.
    Nvfp4FourOverSixMae256,
    /// nvidia-modelopt's NVFP4.
    Nvfp4ModelOpt,
    /// torchao's NVFP4.
    Nvfp4TorchAo,
    /// compressed-tensors' NVFP4.
    Nvfp4Ct,
    /// MXFP4, exponent of amax/6 rounded up.
    Mxfp4Rceil,
    /// MXFP4, exponent of amax less two.
    Mxfp4Floor,
    /// MXFP4, exponent of the rounded amax less two.
    Mxfp4Even,
    /// SGLang's FP4 pool.
    KvMx16,
    /// INT8, a scale a row.
    Int8,
    /// INT8 towards zero.
    Int8Rtz,
    /// INT4 in groups of 128.
    Int4G128,
    /// E4M3, a scale a row.
    Fp8E4m3,
    /// E4M3 towards zero.
    Fp8E4m3Rtz,
    /// E4M3 under E8M0 scales.
    Mxfp8,
}

type Row = (&'static str, usize, u32, ScaleFormat, GlobalKind);

impl Profile {
    /// All of them.
    pub const ALL: [Profile; 19] = [
        Profile::Nvfp4Exact,
        Profile::Nvfp4Fast,
        Profile::Nvfp4FourOverSix,
        Profile::Nvfp4FourOverSixMae,
        Profile::Nvfp4FourOverSix256,
        Profile::Nvfp4FourOverSixMae256,
        Profile::Nvfp4ModelOpt,
        Profile::Nvfp4TorchAo,
        Profile::Nvfp4Ct,
        Profile::Mxfp4Rceil,
        Profile::Mxfp4Floor,
        Profile::Mxfp4Even,
        Profile::KvMx16,
        Profile::Int8,
        Profile::Int8Rtz,
        Profile::Int4G128,
        Profile::Fp8E4m3,
        Profile::Fp8E4m3Rtz,
        Profile::Mxfp8,
    ];

    /// Name, block, bits, scale format, global scale.
    fn row(self) -> Row {
        use {GlobalKind as G, Profile as P, ScaleFormat as S};
        match self {
            P::Nvfp4Exact => ("nvfp4-exact", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4Fast => ("nvfp4-fast", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4FourOverSix => ("nvfp4-4over6", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4FourOverSixMae => ("nvfp4-4over6-mae", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4FourOverSix256 => ("nvfp4-4over6-256", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4FourOverSixMae256 => ("nvfp4-4over6-mae-256", 16, 4, S::E4m3, G::Encode),
            P::Nvfp4ModelOpt => ("nvfp4-modelopt", 16, 4, S::E4m3, G::Decode),
            P::Nvfp4TorchAo => ("nvfp4-torchao", 16, 4, S::E4m3, G::Decode),
            P::Nvfp4Ct => ("nvfp4-ct", 16, 4, S::E4m3, G::Encode),
            P::Mxfp4Rceil => ("mxfp4-rceil", 32, 4, S::E8m0, G::None),
            P::Mxfp4Floor => ("mxfp4-floor", 32, 4, S::E8m0, G::None),
            P::Mxfp4Even => ("mxfp4-even", 32, 4, S::E8m0, G::None),
            P::KvMx16 => ("kv-mx16", 16, 4, S::E8m0, G::None),
            P::Int8 => ("int8", 0, 8, S::F32, G::None),
            P::Int8Rtz => ("int8-rtz", 0, 8, S::F32, G::None),
            P::Int4G128 => ("int4-g128", 128, 4, S::F32, G::None),
            P::Fp8E4m3 => ("fp8-e4m3", 0, 8, S::F32, G::None),
            P::Fp8E4m3Rtz => ("fp8-e4m3-rtz", 0, 8, S::F32, G::None),
            P::Mxfp8 => ("mxfp8", 32, 8, S::E8m0, G::None),
        }
    }

    /// The name, as configurations and records have it.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Elements that share a scale; 0 for a whole row.
    pub fn block(self) -> usize {
        self.row().1
    }

    /// Bits of a code: 4 or 8.
    pub fn bits(self) -> u32 {
        self.row().2
    }

    /// How scales are stored.
    pub fn scale_format(self) -> ScaleFormat {
        self.row().3
    }

    /// Which global scale takes part.
    pub fn global(self) -> GlobalKind {
        self.row().4
    }

    /// Scales of a row of `k` elements.
    pub fn scales(self, k: usize) -> usize {
        k.div_ceil(if self.block() == 0 { k.max(1) } else { self.block() })
    }

    /// Bytes of the packed codes of a row of `k` elements.
    pub fn packed_bytes(self, k: usize) -> usize {
        if self.bits() == 4 {
            k.div_ceil(2)
        } else {
            k
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Profile::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| {
            let known = Profile::ALL.map(Profile::name).join(", ");
            Error::Config(format!("no quantiser profile is called {name:?}\nknown: {known}"))
        })
    }
}
