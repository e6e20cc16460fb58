"""Quantise, pack, and keep low bits, in one pass into buffers the caller owns (safe inside a CUDA graph).

One thread holds whole blocks: a block of 16 is two tiles of 8 elements, each a 16-byte load of bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, hardware_casts, jit, runs_triton, tl
from tracekit.kernels.chains import CHAINS, chain_of, choose_scale, over_scale, scale_factor, scale_inverse
from tracekit.kernels.low_bits import pack_low_bits
from tracekit.kernels.partial import blocks_of, load_partial, place, store_codes
from tracekit.kernels.rounding import (
    e2m1_magnitude,
    e2m1_round,
    narrow,
    pack_words,
    signed_code,
    store_low_bits,
    with_sign,
)
from tracekit.kernels.tiles import add_signs, block_maximum, load_tile, widen_tile
from tracekit.numerics.formats import pack_codes
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import quantize_dequantize

KERNEL_PROFILES = tuple(CHAINS)


@jit
def _tile(
    tile, inverse, factor, decode, four_bits, values_ptr, offset, left, mask,
    ROWS: tl.constexpr, VALUES: tl.constexpr, CHAIN: tl.constexpr, DECODE: tl.constexpr, AWAY: tl.constexpr,
    KEEP: tl.constexpr, PARTIAL: tl.constexpr, PAIRS: tl.constexpr, CAREFUL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    x = widen_tile(tile, ROWS, PAIRS)
    rounded, signed = e2m1_round(x, inverse[:, None], CHAIN == "modelopt" or CHAIN == "ct", AWAY, KEEP, CAREFUL,
                                 INTERPRET)  # fmt: skip
    if VALUES:
        v = e2m1_magnitude(rounded.to(tl.float32, bitcast=True) - 12582916.0) * factor[:, None]
        if DECODE:
            v = v * decode
        v = narrow(with_sign(v, signed), values_ptr, INTERPRET)
        live = mask[:, None]
        if PARTIAL:
            live = live & (tl.arange(0, 8)[None, :] < left[:, None])
        tl.store(values_ptr + offset[:, None] + tl.arange(0, 8)[None, :], v, mask=live)
    if PAIRS and KEEP and not (CAREFUL or INTERPRET):  # NaN counts as positive: that takes care
        return add_signs(pack_words(rounded, ROWS, 4), tile, ROWS)
    return pack_words(signed_code(rounded, signed, four_bits), ROWS, 0)


@jit
def _sixteen(
    x0, x1, inverse, factor, decode, four_bits, packed_ptr, low_ptr, values_ptr, start, packed_at, low_at, left, mask,
    ROWS: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, CHAIN: tl.constexpr, DECODE: tl.constexpr,
    AWAY: tl.constexpr, KEEP: tl.constexpr, PARTIAL: tl.constexpr, PAIRS: tl.constexpr, CAREFUL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Round and store 16 elements from `start` in two tiles: codes from word `packed_at`, low bits as number `low_at`
    of sixteens; PARTIAL: the first `left` elements, and both places are bytes.
    """
    w0 = _tile(x0, inverse, factor, decode, four_bits, values_ptr, start, left, mask, ROWS, VALUES, CHAIN, DECODE,
               AWAY, KEEP, PARTIAL, PAIRS, CAREFUL, INTERPRET)  # fmt: skip
    w1 = _tile(x1, inverse, factor, decode, four_bits, values_ptr, start + 8, left - 8, mask, ROWS, VALUES, CHAIN,
               DECODE, AWAY, KEEP, PARTIAL, PAIRS, CAREFUL, INTERPRET)  # fmt: skip
    if PARTIAL:
        store_codes(packed_ptr, packed_at, low_ptr, low_at, w0, left, mask, BITS)
        store_codes(packed_ptr, packed_at + 4, low_ptr, low_at + BITS, w1, left - 8, mask, BITS)
    else:
        word = packed_at[:, None] + tl.arange(0, 2)[None, :]
        tl.store(packed_ptr + word, tl.join(w0, w1), mask=mask[:, None])
        if BITS > 0:
            store_low_bits(low_ptr, low_at, w0, w1, mask, BITS)


@jit
def quantize_blocks(
    x_ptr, g_ptr, ulp_ptr, packed_ptr, scales_ptr, low_ptr, values_ptr, block, target, scale_at, mask,
    blocks_per_scale, length, four_bits,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, SCALES: tl.constexpr,
    CHAIN: tl.constexpr, TABLE: tl.constexpr, E8M0: tl.constexpr, MIN_SCALE: tl.constexpr, AWAY: tl.constexpr,
    KEEP: tl.constexpr, PARTIAL: tl.constexpr, HARDWARE: tl.constexpr, PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Quantise blocks `block` [ROWS] of x: codes to block `target` of the packed buffer, scales to byte `scale_at`.

    PARTIAL: rows are `length` elements, the last of their blocks short; `packed_ptr` and `low_ptr` point to bytes.
    """
    if PARTIAL:
        row, column = place(block, length, BLOCK)
        left = length - column
        start = row * length + column
        x0 = load_partial(x_ptr, start, left, mask, INTERPRET)
        x1 = load_partial(x_ptr, start + 8, left - 8, mask, INTERPRET)
    else:
        left = block
        start = block * BLOCK
        x0 = load_tile(x_ptr, start, mask, PAIRS)
        x1 = load_tile(x_ptr, start + 8, mask, PAIRS)
    x2, x3 = x0, x1
    if BLOCK == 32:
        if PARTIAL:
            x2 = load_partial(x_ptr, start + 16, left - 16, mask, INTERPRET)
            x3 = load_partial(x_ptr, start + 24, left - 24, mask, INTERPRET)
        else:
            x2 = load_tile(x_ptr, start + 16, mask, PAIRS)
            x3 = load_tile(x_ptr, start + 24, mask, PAIRS)
    amax = block_maximum(x0, x1, x2, x3, False, BLOCK, ROWS, PAIRS, HARDWARE, INTERPRET)
    g = 1.0
    decode = 1.0
    DECODE: tl.constexpr = CHAIN == "exact" or CHAIN == "fast" or CHAIN == "mse" or CHAIN == "mae"
    if not E8M0:
        if SCALES == 1:
            g = tl.load(g_ptr)
            decode = tl.div_rn(1.0, g)
        else:
            g = tl.load(g_ptr + block // blocks_per_scale, mask=mask, other=1.0)
            decode = tl.div_rn(1.0, g)[:, None]
    byte = choose_scale(x0, x1, amax, g, x_ptr, CHAIN, ROWS, MIN_SCALE, PAIRS, HARDWARE, INTERPRET)
    inverse = scale_inverse(byte, g, ulp_ptr, CHAIN, TABLE)
    # Products of 7 and above (a stale global scale, a subnormal block scale) and NaN are rare: they have a branch.
    rare = tl.max(tl.where(over_scale(amax, inverse, CHAIN) < 7.0, 0, 1), axis=0)
    # The second sixteen of a block of 32 is a step further, in the units of packed_at and low_at.
    PACKED_STEP: tl.constexpr = 8 if PARTIAL else 2
    LOW_STEP: tl.constexpr = 2 * BITS if PARTIAL else 1
    if PARTIAL:
        low_at = row * ((length * BITS + 7) // 8) + column // 8 * BITS
        to_row, _ = place(target, length, BLOCK)
        packed_at = to_row * ((length + 1) // 2) + column // 2
    else:
        low_at = block * (BLOCK // 16)
        packed_at = target * (BLOCK // 8)
    if rare > 0:
        amax = block_maximum(x0, x1, x2, x3, True, BLOCK, ROWS, PAIRS, HARDWARE, INTERPRET)
        byte = choose_scale(x0, x1, amax, g, x_ptr, CHAIN, ROWS, MIN_SCALE, PAIRS, HARDWARE, INTERPRET)
        inverse = scale_inverse(byte, g, ulp_ptr, CHAIN, TABLE)
        factor = scale_factor(byte, g, CHAIN)
        _sixteen(x0, x1, inverse, factor, decode, four_bits, packed_ptr, low_ptr, values_ptr, start, packed_at,
                 low_at, left, mask, ROWS, BITS, VALUES, CHAIN, DECODE, AWAY, KEEP, PARTIAL, PAIRS,
                 True, INTERPRET)  # fmt: skip
        if BLOCK == 32:
            _sixteen(x2, x3, inverse, factor, decode, four_bits, packed_ptr, low_ptr, values_ptr, start + 16,
                     packed_at + PACKED_STEP, low_at + LOW_STEP, left - 16, mask, ROWS, BITS, VALUES, CHAIN, DECODE,
                     AWAY, KEEP, PARTIAL, PAIRS, True, INTERPRET)  # fmt: skip
    else:
        factor = scale_factor(byte, g, CHAIN)
        _sixteen(x0, x1, inverse, factor, decode, four_bits, packed_ptr, low_ptr, values_ptr, start, packed_at,
                 low_at, left, mask, ROWS, BITS, VALUES, CHAIN, DECODE, AWAY, KEEP, PARTIAL, PAIRS,
                 False, INTERPRET)  # fmt: skip
        if BLOCK == 32:
            _sixteen(x2, x3, inverse, factor, decode, four_bits, packed_ptr, low_ptr, values_ptr, start + 16,
                     packed_at + PACKED_STEP, low_at + LOW_STEP, left - 16, mask, ROWS, BITS, VALUES, CHAIN, DECODE,
                     AWAY, KEEP, PARTIAL, PAIRS, False, INTERPRET)  # fmt: skip
    tl.store(scales_ptr + scale_at, byte.to(tl.uint8), mask=mask)


@jit
def _quantize_pack_kernel(
    x_ptr, g_ptr, ulp_ptr, packed_ptr, scales_ptr, low_ptr, values_ptr, n_blocks, blocks_per_scale, length,
    four_bits,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, SCALES: tl.constexpr,
    CHAIN: tl.constexpr, TABLE: tl.constexpr, E8M0: tl.constexpr, MIN_SCALE: tl.constexpr, AWAY: tl.constexpr,
    KEEP: tl.constexpr, PARTIAL: tl.constexpr, HARDWARE: tl.constexpr, PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = block < n_blocks
    quantize_blocks(
        x_ptr, g_ptr, ulp_ptr, packed_ptr, scales_ptr, low_ptr, values_ptr, block, block, block, mask,
        blocks_per_scale, length, four_bits, BLOCK, ROWS, BITS, VALUES, SCALES, CHAIN, TABLE, E8M0, MIN_SCALE, AWAY,
        KEEP, PARTIAL, HARDWARE, PAIRS, INTERPRET,
    )  # fmt: skip


def chain_options(p: Profile, x: Tensor, n_scales: int) -> dict[str, object]:
    """Constexpr arguments that the kernels over E2M1 blocks share, but for `TABLE`."""
    return dict(
        BLOCK=p.block, SCALES=1 if n_scales == 1 else 2, CHAIN=CHAINS[p.name], E8M0=p.scale_format == "e8m0",
        MIN_SCALE=getattr(p, "min_scale", 0), AWAY=p.ties == "away", HARDWARE=hardware_casts(x),
        PARTIAL=x.shape[-1] % p.block != 0, PAIRS=x.dtype == torch.bfloat16 and x.shape[-1] % p.block == 0,
        INTERPRET=INTERPRET,
        enable_fp_fusion=False,
    )  # fmt: skip


def units_of(low: Tensor, bits: int) -> Tensor:
    """A buffer of low bits in the units of `store_low_bits`."""
    return low.view(torch.int32 if bits in (2, 4) else torch.uint16)


def check_supported(x: Tensor, p: Profile) -> None:
    """ConfigError unless the kernels quantise x under p."""
    if p.name not in KERNEL_PROFILES:
        raise ConfigError(f"no kernel quantises {p.name}\nkernels exist for {', '.join(KERNEL_PROFILES)}")


def per_block_scales(x: Tensor, g: Tensor | None, block: int) -> tuple[Tensor, int, int]:
    """(scales, their number, blocks each covers) of an encode scale that is one number or one a row or an expert."""
    if g is None:
        return x.new_empty(1, dtype=torch.float32), 1, 1
    g = g.to(torch.float32)
    if g.numel() == 1:
        return g.reshape(1), 1, 1
    blocks = blocks_of(x.shape, block)
    covered = g.expand(*g.shape[:-1], 1).contiguous()
    lead = x.shape[: g.dim() - 1]
    trailing = [i for i, n in enumerate(g.shape[:-1]) if n != lead[i]]
    if g.shape[-1] != 1 or g.dim() != x.dim() or (trailing and trailing != list(range(trailing[0], g.dim() - 1))):
        raise ConfigError(f"a global scale of shape {tuple(g.shape)} does not cover rows of {tuple(x.shape)}")
    return covered, g.numel(), blocks // g.numel()


def launch_quantize_pack(
    x: Tensor, p: Profile, g: Tensor | None, packed: Tensor, scales: Tensor, low: Tensor | None,
    values: Tensor | None, bits: int, rows: int = 0, warps: int = 0,
) -> None:  # fmt: skip
    """Start the kernel, `rows` blocks a program on `warps` warps (0: chosen by size)."""
    x = x.contiguous()
    n, k = blocks_of(x.shape, p.block), x.shape[-1]
    if n == 0:
        return
    g_blocks, n_scales, covers = per_block_scales(x, g if p.has_global else None, p.block)
    rows = rows or (1024 if INTERPRET else 32)  # of 64 the compiler takes two minima for the least of three
    chain = chain_of(p, x)
    if k % p.block == 0:
        packed, low = packed.view(torch.int32), None if low is None else units_of(low, bits)
    _quantize_pack_kernel[(cdiv(n, rows),)](
        x, g_blocks, chain.ulps, packed, scales, scales if low is None else low, x if values is None else values, n,
        covers, k, 0x40800000,
        ROWS=rows, BITS=bits if low is not None else 0, VALUES=values is not None, TABLE=chain.table,
        KEEP=p.keeps_minus_zero, num_warps=warps or max(1, rows // 64), **chain_options(p, x, n_scales),
    )  # fmt: skip


@torch.library.custom_op("tracekit::quantize_pack", mutates_args=("packed", "scales", "low", "values"))
def _quantize_pack(
    x: Tensor, profile: str, g: Tensor | None, packed: Tensor, scales: Tensor, low: Tensor | None,
    values: Tensor | None, bits: int,
) -> None:  # fmt: skip
    p = profile_info(profile)
    if not runs_triton(x):
        v, codes, s = quantize_dequantize(x, p, g)
        packed.copy_(pack_codes(codes))
        scales.copy_(s)
        if low is not None:
            low.copy_(pack_low_bits(codes, bits))
        if values is not None:
            values.copy_(v)
        return
    launch_quantize_pack(x, p, g, packed, scales, low, values, bits)


@_quantize_pack.register_fake
def _(x, profile, g, packed, scales, low, values, bits):
    return None


def quantize_pack_into(
    x: Tensor,
    profile: str | Profile,
    *,
    global_scale: Tensor | None,
    packed: Tensor,
    scales: Tensor,
    low: Tensor | None = None,
    bits: int = 0,
    values: Tensor | None = None,
) -> None:
    """Quantise x [..., K] (any K, any strides) and write, each buffer contiguous and of x's leading shape:

    packed u8 [..., ceil(K/2)]; scales u8 [..., ceil(K/block)]; with `low`, the low `bits` (1..4) bits of each code, u8
    [..., ceil(K*bits/8)], element j in bits [bits*j, bits*j + bits) of its row; with `values`, the dequantised values
    in x's dtype. Bits beyond a row's last element are zero. `global_scale` is a tensor on x's device: one number, or
    [..., 1] of one a row or a leading index.
    """
    p = profile_info(profile)
    check_supported(x, p)
    lead, k = x.shape[:-1], x.shape[-1]
    wanted = {"packed": (packed, cdiv(k, 2)), "scales": (scales, cdiv(k, p.block))}
    if low is not None:
        wanted["low"] = (low, cdiv(k * bits, 8))
    if values is not None:
        wanted["values"] = (values, k)
    for name, (buffer, width) in wanted.items():
        if buffer.shape != (*lead, width) or not buffer.is_contiguous():
            raise ConfigError(f"{name} must be contiguous {(*lead, width)}, not {tuple(buffer.shape)}")
    if p.has_global and global_scale is None:
        raise ConfigError(f"{p.name} needs a global scale")
    _quantize_pack(x.detach(), p.name, global_scale if p.has_global else None, packed, scales, low, values, bits)


def quantize_pack(
    x: Tensor, profile: str | Profile, *, global_scale: Tensor | None = None, bits: int = 0, with_values: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`quantize_pack_into` fresh buffers: (packed, scales, low or None, values or None)."""
    p = profile_info(profile)
    check_supported(x, p)
    lead, k = x.shape[:-1], x.shape[-1]

    def empty(width: int) -> Tensor:
        return torch.empty(*lead, width, dtype=torch.uint8, device=x.device)

    packed, scales = empty(cdiv(k, 2)), empty(cdiv(k, p.block))
    low = empty(cdiv(k * bits, 8)) if bits else None
    values = torch.empty(x.shape, dtype=x.dtype, device=x.device) if with_values else None
    quantize_pack_into(x, p, global_scale=global_scale, packed=packed, scales=scales, low=low, bits=bits, values=values)
    return packed, scales, low, values
