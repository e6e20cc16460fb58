"""What a quantiser profile is: block length, scale format, order of operations, tie rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.numerics.formats import (
    e2m1_decode,
    e4m3_decode,
    e8m0_decode,
    round_e2m1,
)

ONE_SIXTH = 0.16666667163372039794921875  # fl32(1/6), 0x3E2AAAAB
FLT_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Profile:
    """A quantiser by name.

    `block` elements along the last axis (0: the whole row) share one scale of `scale_format` ("e4m3", "e8m0" or
    "fp32"). `has_global` says whether a global scale takes part; it is the encode scale `scale_range`/amax, or with
    `decode_global` its opposite, amax/`scale_range`, as the library that the profile reproduces has it: the number
    that is passed and recorded is the one the chain uses. `ties` is the rule of `round_e2m1`. Without
    `keeps_minus_zero`, -0.0 has code 0 instead of 8. A block whose scale byte is `missing_scale` (that format's NaN)
    stands for "not recorded".
    """

    name: str
    block: int
    scale_format: str
    has_global: bool
    ties: str = "even"
    keeps_minus_zero: bool = True
    decode_global: bool = False
    scale_range: float = 2688.0

    @property
    def missing_scale(self) -> int:
        """Scale byte that marks a block without a record: the NaN of the scale's format."""
        return 0x7F if self.scale_format == "e4m3" else 0xFF

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scales (u8 bytes, or fp32) of fp32 block maxima [..., nb] under the global scale; `dtype` is the source's."""
        raise NotImplementedError

    def scale_value(self, scales: Tensor) -> Tensor:
        """fp32 value of scales."""
        if self.scale_format == "fp32":
            return scales
        return e4m3_decode(scales) if self.scale_format == "e4m3" else e8m0_decode(scales)

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        """Blocks `x` [..., nb, block] over their scale: what the element rounding sees. A fresh fp32 tensor."""
        raise NotImplementedError

    def denormalise(self, q: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        """Values of rounded blocks `q` [..., nb, block], in place: (q * s) * fl(1/g)."""
        q.mul_(value.unsqueeze(-1))
        return q if g is None else q.mul_(per_block(torch.reciprocal(g)))

    def round(self, z: Tensor, *, with_codes: bool, maybe_nan: bool) -> tuple[Tensor, Tensor | None]:
        """Nearest element values of z (overwritten), and their codes."""
        if maybe_nan:
            z.nan_to_num_(nan=6.0, posinf=6.0, neginf=-6.0)
        if with_codes and not self.keeps_minus_zero:
            z.add_(0.0)
        return round_e2m1(z, ties=self.ties, with_codes=with_codes)

    def decode(self, codes: Tensor) -> Tensor:
        """fp32 values of element codes (u8)."""
        return e2m1_decode(codes)

    def round_blocks(
        self, xb: Tensor, amax: Tensor, g: Tensor | None, dtype: torch.dtype, *, with_codes: bool, maybe_nan: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Quantise fp32 blocks [..., nb, block] with maxima [..., nb]: (elements, codes, scales, scale values)."""
        scales = self.block_scale(amax, g, dtype)
        value = self.scale_value(scales)
        q, codes = self.round(self.normalise(xb, scales, value, g), with_codes=with_codes, maybe_nan=maybe_nan)
        return q, codes, scales, value


def per_block(g: Tensor) -> Tensor:
    """A scalar, or [..., 1] with an axis more: broadcasts against [..., nb, block]."""
    return g if g.dim() == 0 else g.unsqueeze(-1)
