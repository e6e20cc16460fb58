"""Rows of a packed FP4 pool: codes and scales that exist already are stored; the values of some rows are loaded.

`store_kv_rows` is one launch for K and V of a layer. `load_kv_rows` gathers and dequantises: what attention over a
cached prefix needs, and never the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, jit, next_power_of_two, runs_triton, tl
from tracekit.kernels.rounding import e2m1_magnitude, e4m3_decode, narrow
from tracekit.numerics import dequantize, profile_info, unpack_codes

PROFILE = "nvfp4-exact"


@jit
def _copy(from_ptr, to_ptr, token, slot, words, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    value = tl.load(from_ptr + token * words + at, mask=at < words, other=0)
    tl.store(to_ptr + slot * words + at, value, mask=at < words)


@jit
def _store_kernel(
    k_codes_ptr, k_scales_ptr, v_codes_ptr, v_scales_ptr, slots_ptr, k_codes_pool, k_scales_pool, v_codes_pool,
    v_scales_pool, code_words, scale_words, CODES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One token: its four rows, as int32 words."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        _copy(k_codes_ptr, k_codes_pool, token, slot, code_words, CODES)
        _copy(v_codes_ptr, v_codes_pool, token, slot, code_words, CODES)
        _copy(k_scales_ptr, k_scales_pool, token, slot, scale_words, SCALES)
        _copy(v_scales_ptr, v_scales_pool, token, slot, scale_words, SCALES)


@jit
def _load_kernel(
    codes_ptr, scales_ptr, slots_ptr, out_ptr, inverse, words, WIDTH: tl.constexpr, INTERPRET: tl.constexpr
):
    """One row: words int32 of eight codes, a scale byte for two of them; value = (code * scale) * inverse."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    at = tl.arange(0, WIDTH)
    ok = at < words
    word = tl.load(codes_ptr + slot * words + at, mask=ok, other=0)
    byte = tl.load(scales_ptr + slot * (words // 2) + at // 2, mask=ok, other=0).to(tl.int32)
    scale = tl.where(byte == 0x7F, float("nan"), e4m3_decode(byte))
    j = tl.arange(0, 8)
    code = (word[:, None] >> (4 * j)[None, :]) & 15
    value = e2m1_magnitude((code & 7).to(tl.float32)) * scale[:, None] * inverse
    value = tl.where(code > 7, -value, value)
    tl.store(
        out_ptr + (row * words + at)[:, None] * 8 + j[None, :], narrow(value, out_ptr, INTERPRET), mask=ok[:, None]
    )


@torch.library.custom_op(
    "tracekit::store_kv_rows", mutates_args=("k_codes_pool", "k_scales_pool", "v_codes_pool", "v_scales_pool")
)
def _store(
    k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, slots: Tensor, k_codes_pool: Tensor,
    k_scales_pool: Tensor, v_codes_pool: Tensor, v_scales_pool: Tensor,
) -> None:  # fmt: skip
    rows = (k_codes, k_scales, v_codes, v_scales)
    pools = (k_codes_pool, k_scales_pool, v_codes_pool, v_scales_pool)
    if len(slots) == 0:
        return
    if not runs_triton(k_codes):
        kept = slots >= 0
        for row, pool in zip(rows, pools, strict=True):
            pool[slots[kept].long()] = row[kept]
        return
    words = [t.contiguous().flatten(1).view(torch.int32) for t in rows]
    pools = [p.flatten(1).view(torch.int32) for p in pools]
    codes, scales = words[0].shape[1], words[1].shape[1]
    _store_kernel[(len(slots),)](
        *words, slots.contiguous(), *pools, codes, scales, CODES=next_power_of_two(codes),
        SCALES=next_power_of_two(scales), num_warps=1,
    )  # fmt: skip


@_store.register_fake
def _(k_codes, k_scales, v_codes, v_scales, slots, k_codes_pool, k_scales_pool, v_codes_pool, v_scales_pool):
    return None


def store_kv_rows(k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], slots: Tensor, pools: tuple[Tensor, ...]) -> None:
    """Put (codes u8 [T, H, D/2], scales u8 [T, H, D/16]) of K and of V into rows `slots` int [T] of `pools`, in place.

    `pools` are K's codes and scales, then V's: u8 [slots, H, ...], contiguous. Negative slots are left out. D is a
    multiple of 16 with H * D a multiple of 64. Capturable in a CUDA graph.
    """
    for row, pool in zip((*k, *v), pools, strict=True):
        if row.shape != (len(slots), *pool.shape[1:]) or pool.shape[1] * pool.shape[2] % 4:
            raise ConfigError(f"rows {tuple(row.shape)} of {len(slots)} tokens do not fit a pool {tuple(pool.shape)}")
        if not pool.is_contiguous():
            raise ConfigError("pools must be contiguous")
    _store(*k, *v, slots, *pools)


@torch.library.custom_op("tracekit::load_kv_rows", mutates_args=())
def _load(codes: Tensor, scales: Tensor, slots: Tensor, global_scale: float, dtype: torch.dtype) -> Tensor:
    d = codes.shape[2] * 2
    if not runs_triton(codes):
        at = slots.long()
        return dequantize(unpack_codes(codes[at], d), scales[at], PROFILE, global_scale, dtype)
    out = torch.empty(len(slots), codes.shape[1], d, dtype=dtype, device=codes.device)
    words = codes.shape[1] * d // 8
    if len(slots):
        inverse = (1.0 / torch.tensor(global_scale, dtype=torch.float32)).item()
        _load_kernel[(len(slots),)](
            codes.view(torch.int32), scales, slots.contiguous(), out, inverse, words, WIDTH=next_power_of_two(words),
            INTERPRET=INTERPRET, num_warps=min(max(cdiv(words, 64), 1), 8), enable_fp_fusion=False,
        )  # fmt: skip
    return out


@_load.register_fake
def _(codes, scales, slots, global_scale, dtype):
    return codes.new_empty(len(slots), codes.shape[1], codes.shape[2] * 2, dtype=dtype)


def load_kv_rows(
    codes: Tensor, scales: Tensor, slots: Tensor, *, global_scale: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Values [n, H, D] in `dtype` of rows `slots` int [n] of a pool, codes u8 [slots, H, D/2] and scales u8
    [slots, H, D/16] of nvfp4-exact: equal to `dequantize` of these rows."""
    block = profile_info(PROFILE).block
    if codes.shape[:2] != scales.shape[:2] or codes.shape[2] * 2 != scales.shape[2] * block:
        raise ConfigError(f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} are not of one pool")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ConfigError("pools must be contiguous")
    return _load(codes, scales, slots, float(global_scale), dtype)
