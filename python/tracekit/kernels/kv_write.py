"""K and V quantised when they are written to a paged pool, with their low bits kept for the record: one kernel.

Layouts of the scales (codes are u8 [slots, Hkv, ceil(D/2)] in all of them; D/block stands for its ceiling):

* `linear`: [slots, Hkv, D/block], what `fp4_decode_attention` reads;
* `native`: [pages, Hkv, page, D/block], SGLang's native NVFP4 pool for K;
* `native_v`: the same with V's swizzle: of S scales a row, scale s of token t of a page lies in row
  4 (t // 4) + s // (S/4), column 4 (s mod S/4) + t mod 4. Needs pages of 4 n tokens and S a multiple of 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, jit, runs_triton, tl
from tracekit.kernels.chains import chain_of
from tracekit.kernels.low_bits import pack_low_bits
from tracekit.kernels.partial import blocks_of
from tracekit.kernels.quantize_pack import (
    chain_options,
    check_supported,
    per_block_scales,
    quantize_blocks,
    units_of,
)
from tracekit.numerics.formats import pack_codes
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import quantize

LAYOUTS = ("linear", "native", "native_v")


@jit
def _write_kv_kernel(
    x_ptr, slots_ptr, g_ptr, ulp_ptr, packed_ptr, scales_ptr, low_ptr, n_blocks, blocks_per_scale, blocks_per_token,
    page, length, four_bits,
    PER_HEAD: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, CHAIN: tl.constexpr,
    TABLE: tl.constexpr, E8M0: tl.constexpr, MIN_SCALE: tl.constexpr, AWAY: tl.constexpr, KEEP: tl.constexpr,
    PARTIAL: tl.constexpr, HARDWARE: tl.constexpr, PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """PER_HEAD is the number of blocks of a head; LAYOUT the index in LAYOUTS."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = block < n_blocks
    slot = tl.load(slots_ptr + block // blocks_per_token, mask=mask, other=-1).to(tl.int64)
    mask = mask & (slot >= 0)
    inner = block % blocks_per_token
    target = slot * blocks_per_token + inner
    at = target
    if LAYOUT > 0:
        row = slot % page
        s = inner % PER_HEAD
        if LAYOUT == 2:
            QUARTER: tl.constexpr = PER_HEAD // 4
            t = row
            row = t // 4 * 4 + s // QUARTER
            s = s % QUARTER * 4 + t % 4
        head = slot // page * (blocks_per_token // PER_HEAD) + inner // PER_HEAD
        at = (head * page + row) * PER_HEAD + s
    quantize_blocks(
        x_ptr, g_ptr, ulp_ptr, packed_ptr, scales_ptr, low_ptr, x_ptr, block, target, at, mask, blocks_per_scale,
        length, four_bits, BLOCK, ROWS, BITS, False, SCALES, CHAIN, TABLE, E8M0, MIN_SCALE, AWAY, KEEP, PARTIAL,
        HARDWARE, PAIRS, INTERPRET,
    )  # fmt: skip


def scale_places(slots: Tensor, heads: int, per_head: int, page: int, layout: str) -> Tensor:
    """Where each scale of rows `slots` int64 [T] lies in its pool, flattened: int64 [T, heads, per_head]."""
    slot, h, s = slots[:, None, None], *(torch.arange(n, device=slots.device) for n in (heads, per_head))
    h = h[None, :, None]
    if layout == "linear":
        return (slot * heads + h) * per_head + s
    t = slot % page
    row, column = t, s
    if layout == "native_v":
        quarter = per_head // 4
        row, column = t // 4 * 4 + s // quarter, s % quarter * 4 + t % 4
    return ((slot // page * heads + h) * page + row) * per_head + column


def launch_write_kv(
    x: Tensor, slots: Tensor, codes_pool: Tensor, scales_pool: Tensor, p: Profile, g: Tensor | None,
    low: Tensor | None, bits: int, page: int, layout: str,
) -> None:  # fmt: skip
    """Start the kernel."""
    x, slots = x.contiguous(), slots.contiguous()
    n, d = blocks_of(x.shape, p.block), x.shape[-1]
    if n == 0:
        return
    g_blocks, n_scales, covers = per_block_scales(x, g if p.has_global else None, p.block)
    chain = chain_of(p, x)
    rows = 1024 if INTERPRET else 32
    if d % p.block == 0:
        codes_pool, low = codes_pool.view(torch.int32), None if low is None else units_of(low, bits)
    _write_kv_kernel[(cdiv(n, rows),)](
        x, slots, g_blocks, chain.ulps, codes_pool, scales_pool, scales_pool if low is None else low, n, covers,
        n // x.shape[0], page, d, 0x40800000,
        PER_HEAD=cdiv(d, p.block), LAYOUT=LAYOUTS.index(layout), ROWS=rows, BITS=bits, TABLE=chain.table,
        KEEP=p.keeps_minus_zero, num_warps=1, **chain_options(p, x, n_scales),
    )  # fmt: skip


@torch.library.custom_op("tracekit::write_kv", mutates_args=("codes_pool", "scales_pool", "low"))
def _write_kv(
    x: Tensor, slots: Tensor, codes_pool: Tensor, scales_pool: Tensor, profile: str, g: Tensor | None,
    low: Tensor | None, bits: int, page: int, layout: str,
) -> None:  # fmt: skip
    p = profile_info(profile)
    if runs_triton(x):
        launch_write_kv(x, slots, codes_pool, scales_pool, p, g, low, bits, page, layout)
        return
    q = quantize(x, p, global_scale=g)
    kept = slots >= 0
    codes_pool[slots[kept]] = pack_codes(q.codes)[kept]
    places = scale_places(slots[kept], *q.scales.shape[1:], page, layout)
    scales_pool.view(-1)[places] = q.scales[kept]
    if low is not None:
        low[kept] = pack_low_bits(q.codes, bits)[kept]


@_write_kv.register_fake
def _(x, slots, codes_pool, scales_pool, profile, g, low, bits, page, layout):
    return None


def write_kv(
    x: Tensor,
    slots: Tensor,
    codes_pool: Tensor,
    scales_pool: Tensor,
    profile: str | Profile,
    *,
    global_scale: Tensor | None = None,
    bits: int = 0,
    layout: str = "linear",
) -> Tensor | None:
    """Write x [T, Hkv, D] (K after RoPE, or V) to rows `slots` int64 [T] of a layer's pools, in place.

    `codes_pool` is u8 [slots, Hkv, ceil(D/2)], `scales_pool` u8 in one of the `layout`s above; both contiguous. Nothing
    is written for a negative slot (a padded batch). Returns the low `bits` bits of the codes, u8
    [T, Hkv, ceil(D*bits/8)], one plane a head (undefined at negative slots), or None for `bits=0`.
    Capturable in a CUDA graph.
    """
    p = profile_info(profile)
    check_supported(x, p)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if p.has_global and global_scale is None:
        raise ConfigError(f"{p.name} needs a global scale")
    heads, d = x.shape[1:]
    page = 1 if layout == "linear" else scales_pool.shape[-2]
    per_head = cdiv(d, p.block)
    row = (heads, per_head) if layout == "linear" else (heads, page, per_head)
    if codes_pool.shape[1:] != (heads, cdiv(d, 2)) or scales_pool.shape[1:] != row:
        raise ConfigError(
            f"pools of {tuple(codes_pool.shape)} and {tuple(scales_pool.shape)} do not take {tuple(x.shape[1:])}\n"
            f"layout {layout} wants {('slots', heads, cdiv(d, 2))} and {('slots' if len(row) == 2 else 'pages', *row)}"
        )
    if not (codes_pool.is_contiguous() and scales_pool.is_contiguous()):
        raise ConfigError("pools must be contiguous")
    if layout == "native_v" and (page % 4 or per_head % 4):
        raise ConfigError(f"native_v swizzles groups of 4: not pages of {page} tokens with {per_head} scales a head")
    low = x.new_empty(*x.shape[:-1], cdiv(d * bits, 8), dtype=torch.uint8) if bits else None
    _write_kv(
        x.detach(), slots, codes_pool, scales_pool, p.name, global_scale if p.has_global else None, low, bits, page,
        layout,
    )  # fmt: skip
    return low
