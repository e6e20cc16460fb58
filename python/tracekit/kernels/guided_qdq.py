"""Guided quantise-dequantise from packed low bits (TRACE, Algorithm 1), with a straight-through backward.

The reference is `tracekit.numerics.guided_round`; this reads the record as it is stored (bits packed along the row)
instead of one code an element. For |z| = a in a binade [2^e, 2^(e+1)) the bracket is as wide as the E2M1 step there,
2^(e-1), so the nearest value q0 and the sign of a - q0 give the other one, q1. With one bit, q1 is taken where the
parity of q0's code differs from the record's, unless a is within an eighth of 2 or 4 from above: there the record's
class has a nearer member on the other side, outside the bracket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, jit, runs_triton, tl
from tracekit.kernels.chains import chain_of, choose_scale, over_scale, scale_factor, scale_inverse
from tracekit.kernels.guided_floor import guided_floor, placed
from tracekit.kernels.low_bits import unpack_low_bits
from tracekit.kernels.partial import blocks_of, load_codes, load_partial, place
from tracekit.kernels.quantize_pack import chain_options, check_supported, per_block_scales, units_of
from tracekit.kernels.rounding import e2m1_magnitude, load_low_bits, narrow, with_sign
from tracekit.kernels.tiles import block_maximum, load_tile, widen_tile
from tracekit.numerics.guided import guided_round
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.scales import resolve_global_scale

FLOOR = False  # this rule has run on an H200, that of `guided_floor` not yet


@jit
def guided_values(
    x, inverse, codes, BITS: tl.constexpr, OPEN: tl.constexpr, CHAIN: tl.constexpr, AWAY: tl.constexpr,
    FLOOR: tl.constexpr, FOLD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """q* of fp32 x [ROWS, 8] under low-bit codes (int32, same shape; FLOOR: placed;
    unused for BITS 0), with the sign of x. FOLD, with
    FLOOR: times 2^-126."""
    z = over_scale(x, inverse, CHAIN)
    if INTERPRET:
        z = tl.where(z != z, 6.0, z)
    if FLOOR and BITS > 0 and not OPEN:
        q = guided_floor(z, codes, BITS, INTERPRET)
        if not FOLD:
            q = q * 8.507059173023462e37
        return with_sign(q, z)
    if OPEN:
        z = z + 0.0  # sgn(-0) is +
    a = tl.minimum(tl.abs(z), 6.0)
    rounded = a
    if AWAY and BITS == 0:
        rounded = (a.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    binade = tl.maximum((a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    r = tl.fma(binade, 6291456.0, rounded)
    q = tl.fma(binade, -6291456.0, r)
    if BITS > 0:
        d = a - q
        step = ((d.to(tl.int32, bitcast=True) & -2147483648) | binade.to(tl.int32, bitcast=True)).to(
            tl.float32, bitcast=True
        )
        other = tl.fma(step, 0.5, q)
        if BITS == 1:
            differs = ((r.to(tl.int32, bitcast=True) ^ codes) & 1) != 0
            # [2, 2.25) and [4, 4.5): exponent of 2 or 4, top three mantissa bits zero
            nearer_outside = (a.to(tl.int32, bitcast=True) & 0x7F700000) == 0x40000000
            take = differs & (d != 0.0) & (nearer_outside == 0)
            target = tl.where(q == 0.0, 1.0, 0.0)
            away = differs
            guided = tl.where(take, other, q)
        else:
            code = codes.to(tl.float32)
            if BITS == 2:
                low = code * 0.5
                high = tl.where(codes == 3, 6.0, code + 2.0)
                target = tl.where(a > (low + high) * 0.5, high, low)
            elif BITS == 3:
                target = e2m1_magnitude(code)
            else:
                target = e2m1_magnitude((codes & 7).to(tl.float32))
                opposite = ((z.to(tl.int32, bitcast=True) >> 28) ^ codes) & 8
                target = tl.where(opposite != 0, -target, target)
            away = target != q
            other = tl.where(d == 0.0, q, other)
            guided = tl.minimum(tl.maximum(target, tl.minimum(q, other)), tl.maximum(q, other))
        if OPEN:  # on a grid value: its neighbour towards the target
            down = tl.where((q == binade) & (q > 1.0), binade * 0.25, binade * 0.5)
            moved = tl.where(target > q, q + binade * 0.5, q - down)
            guided = tl.where((d == 0.0) & away, moved, guided)
        q = guided
    return with_sign(q, z)


@jit
def _codes(word, BITS: tl.constexpr, PLACED: tl.constexpr):
    """Low-bit codes int32 [ROWS, 8] of a word of eight [ROWS]; PLACED for `guided_floor`."""
    if PLACED:
        return placed(word, BITS)
    codes = word[:, None] >> (tl.arange(0, 8) * BITS)[None, :]
    return codes if BITS == 1 else codes & ((1 << BITS) - 1)  # one bit is masked where it is used


@jit
def _load_partial(
    x_ptr, low_ptr, start, low_at, left, mask, BITS: tl.constexpr, PLACED: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Eight elements of each row as fp32 and their codes (the elements again for BITS 0)."""
    x = load_partial(x_ptr, start, left, mask, INTERPRET)
    c = x
    if BITS > 0:
        c = load_codes(low_ptr, low_at, left, mask, BITS)
        if PLACED:
            c = c << (28 if BITS == 4 else 22)
    return x, c


@jit
def _load_sixteen(
    x_ptr, low_ptr, start, index, mask,
    ROWS: tl.constexpr, BITS: tl.constexpr, PLACED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Two tiles from element `start`, sixteen number `index`, and their codes, as `_load_partial`."""
    x0 = load_tile(x_ptr, start, mask, PAIRS)
    x1 = load_tile(x_ptr, start + 8, mask, PAIRS)
    c0, c1 = x0, x1
    if BITS > 0:
        w0, w1 = load_low_bits(low_ptr, index, mask, BITS)
        c0, c1 = _codes(w0, BITS, PLACED), _codes(w1, BITS, PLACED)
    return widen_tile(x0, ROWS, PAIRS), widen_tile(x1, ROWS, PAIRS), c0, c1


@jit
def _guide_tile(
    x, codes, inverse, factor, decode, missing, out_ptr, offset, left, mask,
    BITS: tl.constexpr, OPEN: tl.constexpr, CHAIN: tl.constexpr, AWAY: tl.constexpr, TWO_FACTORS: tl.constexpr,
    SOME_MISSING: tl.constexpr, PARTIAL: tl.constexpr, FLOOR: tl.constexpr, FOLD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Round and store eight elements of each row; rows in `missing` to nearest."""
    if BITS > 0:
        q = guided_values(x, inverse, codes, BITS, OPEN, CHAIN, AWAY, FLOOR, FOLD, INTERPRET)
        if SOME_MISSING:
            nearest = guided_values(x, inverse, codes, 0, False, CHAIN, AWAY, False, False, INTERPRET)
            q = tl.where(missing[:, None] > 0, nearest, q)
    else:
        q = guided_values(x, inverse, 0, 0, False, CHAIN, AWAY, False, False, INTERPRET)
    v = q * factor
    if TWO_FACTORS:
        v = v * decode
    live = mask[:, None]
    if PARTIAL:
        live = live & (tl.arange(0, 8)[None, :] < left[:, None])
    tl.store(out_ptr + offset[:, None] + tl.arange(0, 8)[None, :], narrow(v, out_ptr, INTERPRET), mask=live)


@jit
def _guided_qdq_kernel(
    x_ptr, low_ptr, scales_ptr, g_ptr, ulp_ptr, out_ptr, n_blocks, blocks_per_scale, length,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, OPEN: tl.constexpr, SCALES: tl.constexpr,
    CHAIN: tl.constexpr, TABLE: tl.constexpr, E8M0: tl.constexpr, MIN_SCALE: tl.constexpr, AWAY: tl.constexpr,
    MISSING: tl.constexpr, PARTIAL: tl.constexpr, FLOOR: tl.constexpr, HARDWARE: tl.constexpr, PAIRS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = block < n_blocks
    # Every load is issued before the first use: the branch below waits for the scales.
    PLACED: tl.constexpr = FLOOR and BITS > 0 and not OPEN
    if PARTIAL:
        row, column = place(block, length, BLOCK)
        left = length - column
        start = row * length + column
        at = row * ((length * BITS + 7) // 8) + column // 8 * BITS
        x0, c0 = _load_partial(x_ptr, low_ptr, start, at, left, mask, BITS, PLACED, INTERPRET)
        x1, c1 = _load_partial(x_ptr, low_ptr, start + 8, at + BITS, left - 8, mask, BITS, PLACED, INTERPRET)
    else:
        left = block
        start = block * BLOCK
        x0, x1, c0, c1 = _load_sixteen(x_ptr, low_ptr, start, start // 16, mask, ROWS, BITS, PLACED, PAIRS)
    byte = tl.load(scales_ptr + block, mask=mask, other=0).to(tl.int32)
    x2, x3, c2, c3 = x0, x1, c0, c1
    if BLOCK == 32:
        if PARTIAL:
            x2, c2 = _load_partial(x_ptr, low_ptr, start + 16, at + 2 * BITS, left - 16, mask, BITS, PLACED, INTERPRET)
            x3, c3 = _load_partial(x_ptr, low_ptr, start + 24, at + 3 * BITS, left - 24, mask, BITS, PLACED, INTERPRET)
        else:
            x2, x3, c2, c3 = _load_sixteen(x_ptr, low_ptr, start + 16, start // 16 + 1, mask, ROWS, BITS, PLACED, PAIRS)
    g = 1.0
    decode = 1.0
    if not E8M0:
        if SCALES == 1:
            g = tl.load(g_ptr)
            decode = tl.div_rn(1.0, g)
        else:
            g = tl.load(g_ptr + block // blocks_per_scale, mask=mask, other=1.0)
            decode = tl.div_rn(1.0, g)[:, None]
    TWO_FACTORS: tl.constexpr = CHAIN == "exact" or CHAIN == "fast" or CHAIN == "mse" or CHAIN == "mae"
    # The rule in codes gives q * 2^-126: the factors make up for it, unless one would overflow.
    FOLD: tl.constexpr = PLACED and TWO_FACTORS
    missing = (byte == MISSING).to(tl.int32)
    rare = tl.max(missing, axis=0) > 0
    if FOLD:
        rare = rare | ((decode if SCALES == 1 else tl.max(decode)) >= 1.3292279957849159e36)  # 2^120
    if rare:  # some have no record: nearest under the block's own scale
        amax = block_maximum(x0, x1, x2, x3, True, BLOCK, ROWS, False, HARDWARE, INTERPRET)
        own = choose_scale(x0, x1, amax, g, x_ptr, CHAIN, ROWS, MIN_SCALE, False, HARDWARE, INTERPRET)
        byte = tl.where(missing > 0, own, byte)
        inverse = scale_inverse(byte, g, ulp_ptr, CHAIN, TABLE)[:, None]
        factor = scale_factor(byte, g, CHAIN)[:, None]
        _guide_tile(x0, c0, inverse, factor, decode, missing, out_ptr, start, left, mask, BITS, OPEN,
                    CHAIN, AWAY, TWO_FACTORS, True, PARTIAL, FLOOR, False, INTERPRET)  # fmt: skip
        _guide_tile(x1, c1, inverse, factor, decode, missing, out_ptr, start + 8, left - 8, mask, BITS, OPEN,
                    CHAIN, AWAY, TWO_FACTORS, True, PARTIAL, FLOOR, False, INTERPRET)  # fmt: skip
        if BLOCK == 32:
            _guide_tile(x2, c2, inverse, factor, decode, missing, out_ptr, start + 16, left - 16, mask, BITS, OPEN,
                        CHAIN, AWAY, TWO_FACTORS, True, PARTIAL, FLOOR, False, INTERPRET)  # fmt: skip
            _guide_tile(x3, c3, inverse, factor, decode, missing, out_ptr, start + 24, left - 24, mask, BITS, OPEN,
                        CHAIN, AWAY, TWO_FACTORS, True, PARTIAL, FLOOR, False, INTERPRET)  # fmt: skip
    else:
        inverse = scale_inverse(byte, g, ulp_ptr, CHAIN, TABLE)[:, None]
        factor = scale_factor(byte, g, CHAIN)[:, None]
        if FOLD:
            factor = factor * 6.646139978924579e35  # 2^119: 480, E4M3's largest byte, stays finite
            decode = decode * 128.0
        _guide_tile(x0, c0, inverse, factor, decode, missing, out_ptr, start, left, mask, BITS, OPEN,
                    CHAIN, AWAY, TWO_FACTORS, False, PARTIAL, FLOOR, FOLD, INTERPRET)  # fmt: skip
        _guide_tile(x1, c1, inverse, factor, decode, missing, out_ptr, start + 8, left - 8, mask, BITS, OPEN,
                    CHAIN, AWAY, TWO_FACTORS, False, PARTIAL, FLOOR, FOLD, INTERPRET)  # fmt: skip
        if BLOCK == 32:
            _guide_tile(x2, c2, inverse, factor, decode, missing, out_ptr, start + 16, left - 16, mask, BITS, OPEN,
                        CHAIN, AWAY, TWO_FACTORS, False, PARTIAL, FLOOR, FOLD, INTERPRET)  # fmt: skip
            _guide_tile(x3, c3, inverse, factor, decode, missing, out_ptr, start + 24, left - 24, mask, BITS, OPEN,
                        CHAIN, AWAY, TWO_FACTORS, False, PARTIAL, FLOOR, FOLD, INTERPRET)  # fmt: skip


def launch_guided_qdq(
    x: Tensor, p: Profile, g: Tensor | None, low: Tensor | None, scales: Tensor, out: Tensor, bits: int, open_: bool,
    rows: int = 0, warps: int = 0, floor: bool | None = None,
) -> None:  # fmt: skip
    """Start the kernel, `rows` blocks a program on `warps` warps (0: chosen by size), writing to contiguous `out`.

    `floor` takes the rule of `guided_floor`; None leaves it to `FLOOR`.
    """
    x = x.contiguous()
    n, k = blocks_of(x.shape, p.block), x.shape[-1]
    if n == 0:
        return
    g_blocks, n_scales, covers = per_block_scales(x, g if p.has_global else None, p.block)
    rows = rows or (1024 if INTERPRET else 32)
    chain = chain_of(p, x)
    if low is not None:
        low = low.contiguous()
        if k % p.block == 0:
            low = units_of(low if low.data_ptr() % 4 == 0 else low.clone(), bits)
    _guided_qdq_kernel[(cdiv(n, rows),)](
        x, scales if low is None else low, scales.contiguous(), g_blocks, chain.ulps, out, n, covers, k,
        ROWS=rows, BITS=bits, OPEN=open_, TABLE=chain.table, MISSING=p.missing_scale,
        FLOOR=FLOOR if floor is None else floor,
        num_warps=warps or max(1, rows // 64), **chain_options(p, x, n_scales),
    )  # fmt: skip


@torch.library.custom_op("tracekit::guided_qdq", mutates_args=())
def _guided_qdq(
    x: Tensor, low: Tensor | None, scales: Tensor, g: Tensor | None, bits: int, profile: str, open_: bool
) -> Tensor:
    p = profile_info(profile)
    if not runs_triton(x):
        codes = None if low is None else unpack_low_bits(low, bits, x.shape[-1])
        rounding = "bracket_open" if open_ else "bracket"
        return guided_round(x, codes, scales, bits=bits, profile=p, global_scale=g, rounding=rounding).clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_guided_qdq(x, p, g, low, scales, out, bits, open_)
    return out


@_guided_qdq.register_fake
def _(x, low, scales, g, bits, profile, open_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx, grad):
    return grad, None, None, None, None, None, None


_guided_qdq.register_autograd(_backward)


def guided_qdq(
    x: Tensor,
    low: Tensor | None,
    scales: Tensor,
    *,
    bits: int,
    profile: str | Profile,
    global_scale: Tensor | float | None = None,
    rounding: str = "bracket",
) -> Tensor:
    """Guided quantise-dequantise of x [..., K], in x's dtype; gradient 1 with respect to x only.

    `low` u8 [..., ceil(K*bits/8)] is the record's codes as stored (element j in bits [bits*j, bits*j + bits) of its
    row; None for `bits=0`), `scales` u8 [..., ceil(K/block)] its scale bytes. Otherwise as
    `tracekit.numerics.guided_round`.
    """
    p = profile_info(profile)
    check_supported(x, p)
    if rounding not in ("bracket", "bracket_open"):
        raise ConfigError(f"rounding must be bracket or bracket_open, not {rounding!r}")
    if not 0 <= bits <= 4:
        raise ConfigError(f"bits must be 0..4, not {bits}")
    k = x.shape[-1]
    wanted = (*x.shape[:-1], cdiv(k * bits, 8))
    if bits and (low is None or low.shape != wanted):
        raise ConfigError(f"packed codes must be {wanted}, not {None if low is None else tuple(low.shape)}")
    wanted = (*x.shape[:-1], cdiv(k, p.block))
    if scales.shape != wanted:
        raise ConfigError(f"scales must be {wanted}, not {tuple(scales.shape)}")
    g = resolve_global_scale(x, p, None, global_scale)
    return _guided_qdq(x, low if bits else None, scales, g, bits, p.name, rounding == "bracket_open")
