"""MX formats: a power-of-two block scale in an E8M0 byte. The rule that rounds the exponent is part of the name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.numerics.base import ONE_SIXTH, Profile
from tracekit.numerics.formats import constant, e8m0_inverse


def ceil_exponent(value: Tensor) -> Tensor:
    """Biased exponent (int32) of the least power of two not below fp32 `value` >= 0: 0 for anything up to 2^-127.

    From the bits: a logarithm in fp32 is wrong one or two ulps above a power of two.
    """
    bits = value.view(torch.int32)
    return (bits + 0x7FFFFF).bitwise_right_shift_(23).mul_(bits > 0x400000)


@dataclass(frozen=True)
class MX(Profile):
    """MXFP4. With E the biased exponent of the block maximum, the scale byte is

    rceil: the exponent of amax/6 rounded up to a power of two (TransformerEngine, FlashInfer, cuBLAS, gpt-oss);
    floor: E - 2 (OCP 1.0; maxima in (6, 8) * 2^k saturate); even: as floor, after rounding the mantissa at 1.75
    (quark, compressed-tensors, vLLM). Always clamped to [min_scale, 254]; byte 0 divides by 2^-127.
    """

    rule: str = "rceil"
    min_scale: int = 0

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.rule == "rceil":
            exponent = ceil_exponent(amax * constant(ONE_SIXTH, amax.device))
        else:
            bits = amax.view(torch.int32)
            if self.rule == "even":  # an infinity must not carry into the sign
                bits = torch.where(bits < 0x7F800000, bits + (1 << 21), bits)
            exponent = (bits >> 23) - 2
        return exponent.clamp_(self.min_scale, 254).to(torch.uint8)

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return x * e8m0_inverse(scales).unsqueeze(-1)
