"""Eight-bit and weight-only formats: INT8 and E4M3 per token or channel, MXFP8, INT4 in groups; truncating variants.

Rows of a weight [out, in] are output channels, rows of an activation tokens, so one profile serves both sides of a
W8A8 product. The `-rtz` variants round towards zero instead of to nearest: the stress test of the ACRL paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.numerics.base import Profile
from tracekit.numerics.formats import E4M3_MAX, constant, e4m3_decode, e8m0_inverse
from tracekit.numerics.mx import ceil_exponent

_ONE_448TH = 0.002232142956927418708801  # fl32(1/448)


def round_half_away(z: Tensor) -> Tensor:
    """Nearest integer, halves away from zero (libdevice.round), exact for every fp32."""
    whole = z.trunc()
    return whole + torch.where((z - whole).abs() >= 0.5, torch.copysign(torch.ones_like(z), z), 0.0)


def round_e4m3(z: Tensor, *, truncate: bool = False) -> Tensor:
    """E4M3 values of fp32 z, saturating at 448 (infinities too): to nearest even, or towards zero. NaN stays."""
    z = z.clamp(-E4M3_MAX, E4M3_MAX)
    if truncate:
        cut = (z.view(torch.int32) & -0x100000).view(torch.float32)  # three mantissa bits stay
        small = (z * 512.0).trunc() / 512.0  # subnormals are multiples of 2^-9
        z = torch.where(z.abs() < 2.0**-6, small, cut)
    return z.to(torch.float8_e4m3fn).to(torch.float32)


@dataclass(frozen=True)
class Int(Profile):
    """Symmetric integers. Per row (`block` 0, SGLang): s = amax/127 with amax >= 1e-10, q = round(x * (127/amax)),
    halves away from zero. In groups (compressed-tensors): s = amax/7.5, q = clamp(rint(x / s), -8, 7); 1 for zero s.
    """

    width: int = 8
    truncate: bool = False

    @property
    def bits(self) -> int:
        return self.width

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.width == 8:
            return amax.clamp(min=1e-10) / constant(127.0, amax.device)
        scale = amax / constant(7.5, amax.device)
        return torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)

    def round_blocks(
        self, xb: Tensor, amax: Tensor, g: Tensor | None, dtype: torch.dtype, *, with_codes: bool, maybe_nan: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        scales = self.block_scale(amax, g, dtype)
        if self.width == 8:
            z = xb * torch.div(constant(127.0, amax.device), amax.clamp(min=1e-10)).unsqueeze(-1)
            q = z.trunc() if self.truncate else round_half_away(z)
        else:
            z = xb / scales.unsqueeze(-1)
            q = z.trunc() if self.truncate else z.round()
        q = q.nan_to_num(nan=0.0).clamp_(-(127 if self.width == 8 else 8), 2 ** (self.width - 1) - 1)
        codes = q.to(torch.int8).view(torch.uint8).bitwise_and(2**self.width - 1) if with_codes else None
        return q, codes, scales, scales

    def decode(self, codes: Tensor) -> Tensor:
        signed = codes.view(torch.int8) if self.width == 8 else ((codes ^ 8).to(torch.int8) - 8)
        return signed.to(torch.float32)


@dataclass(frozen=True)
class E4M3(Profile):
    """E4M3 elements. Per row (SGLang): s = amax/448, z = x * (1/s), 0 for a zero row. MXFP8 (`block` 32): the byte is
    the exponent of amax * fl(1/448) rounded up, z exact. NaN stays NaN.
    """

    truncate: bool = False

    @property
    def bits(self) -> int:
        return 8

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.scale_format == "fp32":
            return amax / constant(E4M3_MAX, amax.device)
        return ceil_exponent(amax * constant(_ONE_448TH, amax.device)).clamp_(0, 254).to(torch.uint8)

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        if self.scale_format == "fp32":
            return x * torch.where(value == 0, 0.0, torch.reciprocal(value)).unsqueeze(-1)
        return x * e8m0_inverse(scales).unsqueeze(-1)

    def round(self, z: Tensor, *, with_codes: bool, maybe_nan: bool) -> tuple[Tensor, Tensor | None]:
        q = round_e4m3(z, truncate=self.truncate)
        return q, q.to(torch.float8_e4m3fn).view(torch.uint8) if with_codes else None

    def decode(self, codes: Tensor) -> Tensor:
        return e4m3_decode(codes)
