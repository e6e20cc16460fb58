"""Quantise-dequantise for INT8, INT4 and E4M3 elements, and guided rounding of E4M3 ones: a scale a row or a group.

A group is a row, or `block` elements of one; the last may be short. One program takes a tile of whole groups, and goes
over it twice: for the maxima, then for the elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, hardware_casts, jit, next_power_of_two, runs_triton, tl
from tracekit.kernels.low_bits import unpack_low_bits
from tracekit.kernels.rounding import e4m3_decode, e4m3_encode, narrow, widen, with_sign
from tracekit.numerics.eight_bit import E4M3, Int
from tracekit.numerics.guided_table import check_e4m3, guided_round_e4m3
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import quantize_dequantize


@jit
def _group_scale(amax, KIND: tl.constexpr):
    """(scale as stored: fp32, or the byte as int32; its value; what elements are multiplied or, int4, divided by)."""
    if KIND == "int8":
        amax = tl.maximum(amax, 1e-10)
        s = tl.div_rn(amax, 127.0)
        return s, s, tl.div_rn(127.0, amax)
    elif KIND == "int4":
        s = tl.div_rn(amax, 7.5)
        s = tl.where(s == 0.0, 1.1920928955078125e-07, s)
        return s, s, s
    elif KIND == "e4m3":
        s = tl.div_rn(amax, 448.0)
        return s, s, tl.where(s == 0.0, 0.0, tl.div_rn(1.0, s))
    else:
        bits = (amax * 0.002232142956927418708801).to(tl.int32, bitcast=True)
        byte = tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)
        byte = tl.minimum(byte, 254)
        return byte, _e8m0(byte), _e8m0(254 - byte)


@jit
def _e8m0(byte):
    return tl.maximum(byte << 23, 0x400000).to(tl.float32, bitcast=True)


@jit
def _whole(z, HALF_AWAY: tl.constexpr, TRUNCATE: tl.constexpr):
    """z rounded to a whole number, |z| < 2^22."""
    whole = z.to(tl.int32).to(tl.float32)
    if TRUNCATE:
        return whole
    if HALF_AWAY:
        return whole + tl.where(tl.abs(z - whole) >= 0.5, tl.where(z < 0.0, -1.0, 1.0), 0.0)
    return (z + 12582912.0) - 12582912.0


@jit
def _e4m3_floor(a):
    """Code (int32) of the largest E4M3 magnitude not above a, 0 <= a <= 448."""
    normal = (a.to(tl.int32, bitcast=True) >> 20) - 960
    return tl.where(a < 0.015625, (a * 512.0).to(tl.int32), normal)


@jit
def _round(z, KIND: tl.constexpr, TRUNCATE: tl.constexpr, HARDWARE: tl.constexpr):
    """(values fp32, codes int32) of z."""
    if KIND == "int8" or KIND == "int4":
        z = tl.where(z != z, 0.0, z)
        q = _whole(tl.minimum(tl.maximum(z, -1000.0), 1000.0), KIND == "int8", TRUNCATE)
        if KIND == "int8":
            q = tl.minimum(tl.maximum(q, -127.0), 127.0)
            return q, q.to(tl.int32) & 255
        q = tl.minimum(tl.maximum(q, -8.0), 7.0)
        return q, q.to(tl.int32) & 15
    a = tl.minimum(tl.where(z != z, 0.0, tl.abs(z)), 448.0)
    if TRUNCATE:
        code = _e4m3_floor(a)
    else:
        code = e4m3_encode(a, HARDWARE)
    q = with_sign(e4m3_decode(code), z)
    sign = (z.to(tl.int32, bitcast=True) >> 24) & 128
    return tl.where(z != z, float("nan"), q), tl.where(z != z, 127, code) | sign


@jit
def guided_e4m3(z, c, BITS: tl.constexpr, OPEN: tl.constexpr):
    """q* of fp32 z under low bits c (int32, masked) of E4M3 codes; the reference is `guide_by_table`."""
    if OPEN:
        z = z + 0.0  # sgn(-0) is +
    a = tl.minimum(tl.where(z != z, 0.0, tl.abs(z)), 448.0)
    below = _e4m3_floor(a)
    exact = e4m3_decode(below) == a
    above = tl.where(exact, below, below + 1)
    if BITS == 8:
        target = c & 127
        target = tl.where((((z.to(tl.int32, bitcast=True) >> 24) ^ c) & 128) != 0, -target, target)
    else:
        MASK: tl.constexpr = (1 << BITS) - 1
        down = below - ((below - c) & MASK)
        up = above + ((c - above) & MASK)
        # Codes of four significant bits, 2^17 apart at most: their sum is exact, unlike distances from a.
        twice = e4m3_decode(tl.maximum(down, 0)) + e4m3_decode(tl.minimum(up, 126))
        rise = (a + a > twice) | ((a + a == twice) & (up == above)) | (down < 0)
        target = tl.where((up < 127) & rise, up, down)
    index = tl.where(target <= below, below, above)
    if OPEN:
        step = tl.where(target > below, 1, tl.where(target < below, -1, 0))
        index = tl.where(exact, tl.minimum(below + step, 126), index)
    q = e4m3_decode(tl.abs(index))
    q = tl.where(index < 0, -q, q)
    return tl.where(z != z, float("nan"), with_sign(q, z))


@jit
def _eight_bit_kernel(
    x_ptr, low_ptr, given_ptr, values_ptr, codes_ptr, scales_ptr, n_groups, groups_per_row, width, length, low_width,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, TRUNCATE: tl.constexpr, BITS: tl.constexpr,
    OPEN: tl.constexpr, CODES: tl.constexpr, HARDWARE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Groups of `width` elements in rows of `length`. BITS > 0: guided by `low_ptr` under the scales `given_ptr`."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = group < n_groups
    row = group // groups_per_row
    first = (group % groups_per_row) * width
    size = tl.minimum(length - first, width)
    amax = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, CHUNK):
        j = start + tl.arange(0, CHUNK)
        mask = live[:, None] & (j[None, :] < size[:, None])
        x = widen(tl.load(x_ptr + (row * length + first)[:, None] + j[None, :], mask=mask, other=0.0), INTERPRET)
        amax = tl.maximum(amax, tl.max(tl.where(x != x, 0.0, tl.abs(x)), axis=1))
    stored, value, inverse = _group_scale(amax, KIND)
    missing = live & (group < 0)
    if BITS > 0:
        if KIND == "e4m3":
            given = tl.load(given_ptr + group, mask=live, other=1.0)
            missing = given != given
            value = tl.where(missing, value, given)
            inverse = tl.where(missing, inverse, tl.where(given == 0.0, 0.0, tl.div_rn(1.0, given)))
        else:
            given = tl.load(given_ptr + group, mask=live, other=0).to(tl.int32)
            missing = given == 255
            value = tl.where(missing, value, _e8m0(given))
            inverse = tl.where(missing, inverse, _e8m0(254 - given))
    for start in range(0, width, CHUNK):
        j = start + tl.arange(0, CHUNK)
        mask = live[:, None] & (j[None, :] < size[:, None])
        at = (row * length + first)[:, None] + j[None, :]
        x = widen(tl.load(x_ptr + at, mask=mask, other=0.0), INTERPRET)
        if KIND == "int4":
            z = tl.div_rn(x, inverse[:, None])
        else:
            z = x * inverse[:, None]
        q, code = _round(z, KIND, TRUNCATE, HARDWARE)
        if BITS > 0:
            bit = (first[:, None] + j[None, :]) * BITS
            byte = bit // 8
            word = tl.load(low_ptr + row[:, None] * low_width + byte, mask=mask, other=0).to(tl.int32)
            last = mask & (byte + 1 < low_width)
            word = word | (tl.load(low_ptr + row[:, None] * low_width + byte + 1, mask=last, other=0).to(tl.int32) << 8)
            c = (word >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
            q = tl.where(missing[:, None], q, guided_e4m3(z, c, BITS, OPEN))
        tl.store(values_ptr + at, narrow(q * value[:, None], values_ptr, INTERPRET), mask=mask)
        if CODES:
            tl.store(codes_ptr + at, code.to(tl.uint8), mask=mask)
    if BITS == 0:
        tl.store(scales_ptr + group, stored.to(scales_ptr.dtype.element_ty), mask=live)


def _launch(
    x: Tensor, p: Profile, values: Tensor, codes: Tensor | None, scales: Tensor, low: Tensor | None, bits: int,
    open_: bool,
) -> None:  # fmt: skip
    """Start the kernel on contiguous x with at least one element."""
    k = x.shape[-1]
    width = p.block or k
    groups = cdiv(k, width)
    chunk = min(next_power_of_two(width), 4096)
    rows = max(1, (16384 if INTERPRET else 4096) // chunk)
    n = x.numel() // k * groups
    kind = f"int{p.bits}" if isinstance(p, Int) else "e4m3" if p.scale_format == "fp32" else "mx"
    _eight_bit_kernel[(cdiv(n, rows),)](
        x, x if low is None else low, scales, values, values if codes is None else codes, scales, n, groups, width, k,
        0 if low is None else low.shape[-1],
        ROWS=rows, CHUNK=chunk, KIND=kind, TRUNCATE=p.truncate, BITS=bits, OPEN=open_, CODES=codes is not None,
        HARDWARE=hardware_casts(x), INTERPRET=INTERPRET, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def check_eight_bit(p: Profile) -> None:
    """ConfigError unless p has INT8, INT4 or E4M3 elements."""
    if not isinstance(p, Int | E4M3):
        raise ConfigError(f"{p.name} is an FP4 profile\nuse quantize_pack")


@torch.library.custom_op("tracekit::quantize_eight_bit", mutates_args=())
def _quantize_eight_bit(x: Tensor, profile: str) -> tuple[Tensor, Tensor, Tensor]:
    p = profile_info(profile)
    if not runs_triton(x) or x.numel() == 0:
        return quantize_dequantize(x, p)
    x = x.contiguous()
    values, codes, scales = _empty(x, p)
    _launch(x, p, values, codes, scales, None, 0, False)
    return values, codes, scales


def _empty(x: Tensor, p: Profile) -> tuple[Tensor, Tensor, Tensor]:
    groups = cdiv(x.shape[-1], p.block or max(x.shape[-1], 1))
    dtype = torch.float32 if p.scale_format == "fp32" else torch.uint8
    values = torch.empty_like(x, memory_format=torch.contiguous_format)
    return values, values.new_empty(x.shape, dtype=torch.uint8), values.new_empty(*x.shape[:-1], groups, dtype=dtype)


@_quantize_eight_bit.register_fake
def _(x, profile):
    return _empty(x, profile_info(profile))


def quantize_eight_bit(x: Tensor, profile: str | Profile) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_dequantize` of x [..., K] under an INT8, INT4 or E4M3 profile in one kernel: (values in x's dtype,
    codes u8 [..., K], scales [..., ceil(K/block)]). No gradient.
    """
    p = profile_info(profile)
    check_eight_bit(p)
    return _quantize_eight_bit(x.detach(), p.name)


@torch.library.custom_op("tracekit::guided_qdq_e4m3", mutates_args=())
def _guided_qdq_e4m3(x: Tensor, low: Tensor, scales: Tensor, bits: int, profile: str, open_: bool) -> Tensor:
    p = profile_info(profile)
    if not runs_triton(x) or x.numel() == 0:
        codes = unpack_low_bits(low, bits, x.shape[-1])
        rounding = "bracket_open" if open_ else "bracket"
        return guided_round_e4m3(x, codes, scales, bits=bits, profile=p, rounding=rounding).clone()
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, p, out, None, scales.contiguous(), low.contiguous(), bits, open_)
    return out


@_guided_qdq_e4m3.register_fake
def _(x, low, scales, bits, profile, open_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_guided_qdq_e4m3.register_autograd(lambda ctx, grad: (grad, None, None, None, None, None))


def guided_qdq_e4m3(
    x: Tensor, low: Tensor, scales: Tensor, *, bits: int, profile: str | Profile, rounding: str = "bracket"
) -> Tensor:
    """`guided_round_e4m3` from packed low bits, u8 [..., ceil(K*bits/8)]: x's dtype, gradient 1 to x only."""
    p = profile_info(profile)
    check_e4m3(p, bits, rounding)
    wanted = (*x.shape[:-1], cdiv(x.shape[-1] * bits, 8))
    if low.shape != wanted:
        raise ConfigError(f"packed codes must be {wanted}, not {tuple(low.shape)}")
    return _guided_qdq_e4m3(x, low, scales, bits, p.name, rounding == "bracket_open")
