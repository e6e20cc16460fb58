"""Quantise, and quantise-dequantise, under a named profile (design contracts: scale conventions, partial blocks).

Special values, the same for every profile unless its docstring says otherwise: NaN is ignored by the block maximum and
becomes +6 (code 7), as `cvt.rn.satfinite.e2m1x2` has it; an infinity saturates its block's scale and its own code; -0
and negatives that round to zero have code 8. A last block shorter than the profile's is quantised over the elements
it has, as if padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tracekit.numerics.formats import (
    INFINITY_BITS,
    MAGNITUDE_BITS,
    constant,
    pack_codes,
)
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.scales import resolve_global_scale

# A CPU works through a large tensor in pieces whose temporaries stay in its cache.
_PIECE = 1 << 17


@dataclass
class Quantized:
    """A quantised tensor: `codes` u8 [..., K] (one E2M1 code an element), `scales` u8 [..., ceil(K/block)],
    `global_scale` the fp32 encode scale (scalar, or broadcastable [..., 1]; None without one), `dtype` of the source.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    profile: Profile
    dtype: torch.dtype

    @cached_property
    def packed(self) -> Tensor:
        """u8 [..., ceil(K/2)], element 2j in the low nibble of byte j; eight-bit codes as they are."""
        return pack_codes(self.codes) if self.profile.bits == 4 else self.codes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values [..., K] in `dtype` (default: the source's)."""
        return dequantize(self.codes, self.scales, self.profile, self.global_scale, dtype or self.dtype)


def quantize(
    x: Tensor,
    profile: str | Profile,
    *,
    amax: Tensor | float | str | None = None,
    global_scale: Tensor | float | None = None,
) -> Quantized:
    """Quantise x [..., K] (fp32, bf16 or fp16; any strides) along its last axis.

    NVFP4 profiles take the encode scale as `global_scale` (scalar or broadcastable [..., 1]), or `amax` from which
    g = 2688/amax, or `amax="token"` for each token's own. Never a whole forward's maximum. No gradient.
    """
    p = profile_info(profile)
    g = resolve_global_scale(x, p, amax, global_scale)
    with torch.no_grad():
        _, codes, scales = _round(x, p, g, with_codes=True, with_values=False)
    return Quantized(codes, scales, g, p, x.dtype)


def quantize_dequantize(
    x: Tensor,
    profile: str | Profile,
    global_scale: Tensor | float | None = None,
    *,
    amax: Tensor | float | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, codes, scales) of x [..., K] in one pass: values in x's dtype, u8 [..., K], u8 [..., ceil(K/block)].

    Equal to `quantize` followed by `dequantize`, but for the sign of zeros in `values`. No gradient.
    """
    p = profile_info(profile)
    g = resolve_global_scale(x, p, amax, global_scale)
    with torch.no_grad():
        values, codes, scales = _round(x, p, g, with_codes=True, with_values=True)
    return values, codes, scales


def fake_quantize(
    x: Tensor,
    profile: str | Profile,
    *,
    global_scale: Tensor | float | None = None,
    amax: Tensor | float | str | None = None,
) -> Tensor:
    """x [..., K] quantised and dequantised, in x's dtype. The gradient passes through unchanged, everywhere."""
    p = profile_info(profile)
    g = resolve_global_scale(x, p, amax, global_scale)
    with torch.no_grad():
        values, _, _ = _round(x, p, g, with_codes=False, with_values=True)
    return straight_through(x, values)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    profile: str | Profile,
    global_scale: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of `codes` u8 [..., K] under `scales` u8 [..., ceil(K/block)]: (q * s) * fl(1/g), in dtype."""
    p = profile_info(profile)
    g = None
    if p.has_global:
        g = resolve_global_scale(scales, p, None, global_scale)
    k = codes.shape[-1]
    q = to_blocks(p.decode(codes), p.block or max(k, 1))
    return from_blocks(p.denormalise(q, p.scale_value(scales), g), k).to(dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, values: Tensor) -> Tensor:
    """`values`, bit for bit, with derivative 1 with respect to x and none to anything else."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, values)
    return values


def to_blocks(x: Tensor, block: int) -> Tensor:
    """[..., K] -> [..., ceil(K/block), block], zero-padded."""
    k = x.shape[-1]
    if k % block:
        x = torch.nn.functional.pad(x, (0, block - k % block))
    return x.reshape(*x.shape[:-1], -(-k // block), block)


def from_blocks(x: Tensor, k: int) -> Tensor:
    """[..., nb, block] -> [..., K]; drops the padding."""
    x = x.flatten(-2)
    return x if x.shape[-1] == k else x[..., :k].contiguous()


def block_maximum(xb: Tensor) -> tuple[Tensor, bool]:
    """max |x| of each block, NaN ignored, and whether a NaN may be there (True where asking would cost a sync)."""
    bits = xb.view(torch.int32).bitwise_and(constant(MAGNITUDE_BITS, xb.device))
    amax = bits.amax(-1)
    concrete = type(xb) is Tensor and xb.device.type == "cpu" and not torch.compiler.is_compiling()
    if concrete and not (amax > constant(INFINITY_BITS, xb.device)).any():
        return amax.view(torch.float32), False
    return torch.where(bits > INFINITY_BITS, 0, bits).amax(-1).view(torch.float32), True


def row_pieces(x: Tensor) -> list[slice]:
    """Slices of x's rows (all axes but the last, flattened) to work on one after the other; none if x is small."""
    k = x.shape[-1]
    if x.numel() <= 2 * _PIECE or x.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    step = max(1, _PIECE // k)
    return [slice(i, i + step) for i in range(0, x.numel() // k, step)] if step < x.numel() // k else []


def piece_of(g: Tensor | None, x: Tensor, rows: slice) -> Tensor | None:
    """The encode scales of those rows of x, [rows, 1] or a scalar."""
    if g is None or g.numel() == 1:
        return None if g is None else g.reshape(())
    return g.expand(*x.shape[:-1], 1).reshape(-1, 1)[rows]


def _round(
    x: Tensor, p: Profile, g: Tensor | None, *, with_codes: bool, with_values: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    k = x.shape[-1]
    if x.numel() == 0:
        dtype = torch.float32 if p.scale_format == "fp32" else torch.uint8
        scales = torch.zeros(*x.shape[:-1], -(-k // (p.block or max(k, 1))), dtype=dtype, device=x.device)
        return torch.empty_like(x), torch.zeros(x.shape, dtype=torch.uint8, device=x.device), scales
    pieces = row_pieces(x)
    if pieces:
        rows = x.detach().reshape(-1, k)
        parts = [_round(rows[i], p, piece_of(g, x, i), with_codes=with_codes, with_values=with_values) for i in pieces]
        values, codes, scales = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
        return (
            None if values is None else values.view(x.shape),
            None if codes is None else codes.view(x.shape),
            scales.view(*x.shape[:-1], -1),
        )
    xb = to_blocks(x.detach().to(torch.float32), p.block or k)
    amax, maybe_nan = block_maximum(xb)
    q, codes, scales, value = p.round_blocks(xb, amax, g, x.dtype, with_codes=with_codes, maybe_nan=maybe_nan)
    values = from_blocks(p.denormalise(q, value, g), k).to(x.dtype) if with_values else None
    return values, from_blocks(codes, k) if with_codes else None, scales
