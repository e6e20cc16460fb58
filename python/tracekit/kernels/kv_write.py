"""K and V quantised when they are written to a paged pool, with their low bits kept for the record."""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels.quantize_pack import quantize_pack
from tracekit.numerics.profiles import Profile, profile_info


def write_kv(
    x: Tensor,
    slots: Tensor,
    codes_pool: Tensor,
    scales_pool: Tensor,
    profile: str | Profile,
    *,
    global_scale: Tensor | None = None,
    bits: int = 0,
) -> Tensor | None:
    """Write x [T, Hkv, D] (K after RoPE, or V) to rows `slots` int64 [T] of a layer's pools, in place.

    Pools are u8 [slots, Hkv, D/2] and [slots, Hkv, D/block]: what `fp4_decode_attention` reads. Returns the low
    `bits` bits of the codes, u8 [T, Hkv, D*bits/8], one plane a head, or None for `bits=0`.
    """
    p = profile_info(profile)
    wanted = (*x.shape[1:-1], x.shape[-1] // 2), (*x.shape[1:-1], x.shape[-1] // p.block)
    if (codes_pool.shape[1:], scales_pool.shape[1:]) != tuple(torch.Size(w) for w in wanted):
        raise ConfigError(
            f"pools of {tuple(codes_pool.shape)} and {tuple(scales_pool.shape)} do not take {x.shape[1:]}"
        )
    packed, scales, low, _ = quantize_pack(x, p, global_scale=global_scale, bits=bits)
    codes_pool.index_copy_(0, slots, packed)
    scales_pool.index_copy_(0, slots, scales)
    return low
