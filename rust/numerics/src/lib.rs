//! Quantisers by named profile, byte for byte those of the PyTorch reference `tracekit.numerics`.
//!
//! A [`Quantizer`] takes rows of fp32, bf16 or fp16 values and writes packed codes, block scales and, in the same pass,
//! the low bits that a guidance record keeps. It also dequantises, and rounds under such a record. Every operation on
//! floats is written in the order of the profile's chain; nothing is fused and nothing reassociated, so the portable
//! build and the AVX2 one give the same bytes.
//!
//! ```
//! use tracekit_numerics::{Global, Outputs, Profile, Quantizer, ScalesMut, Values};
//!
//! let x = [6.0f32, -3.0, 1.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
//! let (mut packed, mut scales) = ([0u8; 8], [0u8; 1]);
//! let outputs = Outputs { packed: Some(&mut packed), scales: Some(ScalesMut::Bytes(&mut scales)), ..Outputs::none() };
//! Quantizer::new(Profile::Nvfp4Exact).quantize(Values::F32(&x), 16, Global::One(1.0), outputs)?;
//! assert_eq!((packed[0], packed[1], scales[0]), (0xd7, 0x13, 0x38));
//! # Ok::<(), tracekit_numerics::Error>(())
//! ```
mod chain;
mod element;
mod error;
mod float;
mod guide;
mod isa;
mod kernel;
mod pack;
mod profile;
mod quantizer;
mod reciprocal;
mod rows;
mod scale;
mod values;

pub use error::Error;
pub use guide::{Guide, Record, Rounding};
pub use isa::Isa;
pub use pack::low_bytes;
pub use profile::{GlobalKind, Profile, ScaleFormat};
pub use quantizer::Quantizer;
pub use reciprocal::approximate_reciprocal;
pub use values::{Dtype, Global, Outputs, Scales, ScalesMut, Values, ValuesMut};
