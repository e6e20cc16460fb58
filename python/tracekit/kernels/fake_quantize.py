"""Quantise-dequantise for emulation, with a straight-through backward, in one kernel.

The kernel is that of `quantize_pack`, whose codes and scales go to scratch: an eighth more traffic than values alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.kernels._triton import cdiv, runs_triton
from tracekit.kernels.quantize_pack import check_supported, launch_quantize_pack
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import quantize_dequantize
from tracekit.numerics.scales import resolve_global_scale


@torch.library.custom_op("tracekit::fake_quantize", mutates_args=())
def _fake_quantize(x: Tensor, profile: str, g: Tensor | None) -> Tensor:
    p = profile_info(profile)
    if not runs_triton(x):
        values = quantize_dequantize(x, p, g)[0]
        return values if values.is_contiguous() else values.contiguous()
    lead, k = x.shape[:-1], x.shape[-1]
    values = torch.empty_like(x, memory_format=torch.contiguous_format)
    packed = values.new_empty(*lead, cdiv(k, 2), dtype=torch.uint8)
    scales = values.new_empty(*lead, cdiv(k, p.block), dtype=torch.uint8)
    launch_quantize_pack(x, p, g, packed, scales, None, values, 0)
    return values


@_fake_quantize.register_fake
def _(x, profile, g):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_fake_quantize.register_autograd(lambda ctx, grad: (grad, None, None))


def fake_quantize(
    x: Tensor, profile: str | Profile, *, global_scale: Tensor | float | None = None, amax: Tensor | float | None = None
) -> Tensor:
    """`tracekit.numerics.fake_quantize` of x [..., K] under an FP4 profile: x's dtype, gradient 1 to x only."""
    p = profile_info(profile)
    check_supported(x, p)
    return _fake_quantize(x, p.name, resolve_global_scale(x, p, amax, global_scale))
