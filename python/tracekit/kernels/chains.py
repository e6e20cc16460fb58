"""The profiles' orders of operations on the device: the kernels are one body, `CHAIN` says which profile it runs.

`CHAIN` is a constexpr: "exact", "fast", "modelopt", "torchao", "ct", "mse" and "mae" (4over6) under E4M3 scales;
"rceil", "floor", "even" under E8M0 scales. Branches on it cost nothing at run time. A chain says how a block's scale
byte follows from its maximum, what an element is multiplied (or, "modelopt" and "ct", divided) by before it is rounded,
and what a rounded element is multiplied by after. The reference of each is the class in `tracekit.numerics`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tracekit.kernels._triton import hardware_reciprocal, jit, tl
from tracekit.kernels.rounding import e2m1_nearest, e4m3_decode, e4m3_encode, narrow
from tracekit.kernels.tiles import widen_tile
from tracekit.numerics.profiles import PROFILES, Profile
from tracekit.numerics.reciprocal import ulp_table

CHAINS = {
    "nvfp4-exact": "exact",
    "nvfp4-fast": "fast",
    "nvfp4-4over6": "mse",
    "nvfp4-4over6-256": "mse",
    "nvfp4-4over6-mae": "mae",
    "nvfp4-4over6-mae-256": "mae",
    "nvfp4-modelopt": "modelopt",
    "nvfp4-torchao": "torchao",
    "nvfp4-ct": "ct",
    "mxfp4-rceil": "rceil",
    "mxfp4-floor": "floor",
    "mxfp4-even": "even",
    "kv-mx16": "rceil",
}
assert set(CHAINS) <= set(PROFILES)


class Chain(NamedTuple):
    """`name` is the constexpr; `ulps` what `ulp_ptr` points at; `table` whether the reciprocal is looked up there."""

    name: str
    ulps: Tensor
    table: bool


def chain_of(p: Profile, x: Tensor) -> Chain:
    """The chain that kernels run for `p` on x's device, with the reciprocal table where `nvfp4-fast` needs it."""
    table = p.name == "nvfp4-fast" and not hardware_reciprocal(x)
    return Chain(CHAINS[p.name], ulp_table(x.device) if table else x, table)


@jit
def approximate_reciprocal(x, ulp_ptr, TABLE: tl.constexpr):
    """rcp.approx.ftz.f32 of fp32 x >= 0: the instruction, or (TABLE) what it measured as on sm_90."""
    if TABLE:
        bits = x.to(tl.int32, bitcast=True)
        x = tl.where(bits < 0x00800000, 0.0, x)
        exact = tl.div_rn(1.0, x).to(tl.int32, bitcast=True)
        near = exact + tl.load(ulp_ptr + (bits & 0x7FFFFF)).to(tl.int32)
        near = tl.where(exact >= 0x7F800000, exact, near)
        return tl.where(exact < 0x00800000, 0, near).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def over_scale(x, inverse, CHAIN: tl.constexpr):
    """x over its block's scale: what is rounded."""
    if CHAIN == "modelopt" or CHAIN == "ct":
        return tl.div_rn(x, inverse)
    return x * inverse


@jit
def block_scale(
    amax, g, like_ptr, CHAIN: tl.constexpr, MIN_SCALE: tl.constexpr, HARDWARE: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Scale byte (int32) of fp32 block maxima under g; `like_ptr` has the source's element type. Not for 4over6."""
    if CHAIN == "rceil":
        bits = (amax * 0.16666667163372040).to(tl.int32, bitcast=True)
        byte = tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)
        return tl.minimum(tl.maximum(byte, MIN_SCALE), 254)
    if CHAIN == "floor" or CHAIN == "even":
        bits = amax.to(tl.int32, bitcast=True)
        if CHAIN == "even":  # an infinity must not carry into the sign
            bits = tl.where(bits < 0x7F800000, bits + 0x200000, bits)
        return tl.minimum(tl.maximum((bits >> 23) - 2, MIN_SCALE), 254)
    if CHAIN == "fast":  # rcp(6) is the correctly rounded 1/6
        v = g * (amax * 0.16666667163372040)
    elif CHAIN == "modelopt":
        ratio = tl.div_rn(amax, 6.0 * g)
        v = tl.maximum(tl.where(ratio == 0.0, 1.0, ratio), 0.001953125)
    elif CHAIN == "torchao":
        v = tl.maximum(tl.div_rn(tl.div_rn(amax, 6.0), g), 0.015625)
    elif CHAIN == "ct":
        v = g * narrow(tl.div_rn(amax, 6.0), like_ptr, INTERPRET).to(tl.float32)
    else:
        v = amax * (g * 0.16666667163372040)
    byte = e4m3_encode(v, HARDWARE)
    if CHAIN == "ct":
        byte = tl.where(byte == 0, 0x20, byte)
    return byte


@jit
def scale_inverse(byte, g, ulp_ptr, CHAIN: tl.constexpr, TABLE: tl.constexpr):
    """What `over_scale` takes: the factor of a block's elements, or their divisor."""
    if CHAIN == "rceil" or CHAIN == "floor" or CHAIN == "even":
        return tl.maximum((254 - byte) << 23, 0x400000).to(tl.float32, bitcast=True)
    s = e4m3_decode(byte)
    if CHAIN == "fast":
        inverse = approximate_reciprocal(s * approximate_reciprocal(g, ulp_ptr, TABLE), ulp_ptr, TABLE)
        return tl.where(s == 0.0, 0.0, inverse)
    if CHAIN == "modelopt":
        return s * g
    if CHAIN == "ct":
        return tl.div_rn(s, g)
    if CHAIN == "torchao":
        return tl.div_rn(tl.div_rn(1.0, g), s)
    return tl.minimum(tl.div_rn(1.0, s * tl.div_rn(1.0, g)), 3.4028234663852886e38)


@jit
def scale_factor(byte, g, CHAIN: tl.constexpr):
    """What rounded elements are multiplied by (then by 1/g, where `over_scale` multiplies and g is an encode scale)."""
    if CHAIN == "rceil" or CHAIN == "floor" or CHAIN == "even":
        return tl.maximum(byte << 23, 0x400000).to(tl.float32, bitcast=True)
    s = e4m3_decode(byte)
    if CHAIN == "modelopt" or CHAIN == "torchao":
        return s * g
    if CHAIN == "ct":
        return tl.div_rn(s, g)
    return s


@jit
def _error_terms(x, scaled, inverse, s, MAE: tl.constexpr):
    """Squared or absolute differences of x [ROWS, 8] quantised under one scale a row from x g."""
    difference = e2m1_nearest(x * inverse[:, None]) * s[:, None] - scaled
    return tl.abs(difference) if MAE else difference * difference


@jit
def _add_in_order(total, t, ROWS: tl.constexpr):
    """total + t[:, 0] + ... + t[:, 7], left to right."""
    even, odd = tl.split(tl.reshape(t, (ROWS, 4, 2)))
    t04, t26 = tl.split(tl.reshape(even, (ROWS, 2, 2)))
    t15, t37 = tl.split(tl.reshape(odd, (ROWS, 2, 2)))
    t0, t4 = tl.split(t04)
    t1, t5 = tl.split(t15)
    t2, t6 = tl.split(t26)
    t3, t7 = tl.split(t37)
    return total + t0 + t1 + t2 + t3 + t4 + t5 + t6 + t7


@jit
def _scaled(x, g):
    """x g as the error sees it: NaN counts as zero, infinities as the largest finite numbers."""
    v = x * g[:, None]
    v = tl.where(v != v, 0.0, v)
    return tl.minimum(tl.maximum(v, -3.4028234663852886e38), 3.4028234663852886e38)


@jit
def four_or_six(x0, x1, amax, g, CHAIN: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    """4over6's scale byte of blocks whose elements are x0 and x1 [ROWS, 8]: maximum at 4 where that errs less."""
    g = g + tl.zeros_like(amax)
    v = tl.div_rn(amax, 6.0) * g
    six = e4m3_encode(v, HARDWARE)
    four = e4m3_encode(v * 1.5, HARDWARE)
    y0 = _scaled(x0, g)
    y1 = _scaled(x1, g)
    inverse = scale_inverse(six, g, 0, CHAIN, False)
    s = e4m3_decode(six)
    zero = tl.zeros_like(amax)
    at_six = _add_in_order(zero, _error_terms(x0, y0, inverse, s, CHAIN == "mae"), ROWS)
    at_six = _add_in_order(at_six, _error_terms(x1, y1, inverse, s, CHAIN == "mae"), ROWS)
    inverse = scale_inverse(four, g, 0, CHAIN, False)
    s = e4m3_decode(four)
    at_four = _add_in_order(zero, _error_terms(x0, y0, inverse, s, CHAIN == "mae"), ROWS)
    at_four = _add_in_order(at_four, _error_terms(x1, y1, inverse, s, CHAIN == "mae"), ROWS)
    return tl.where((at_four < at_six) & (amax != 0.0), four, six)


@jit
def choose_scale(
    x0, x1, amax, g, like_ptr, CHAIN: tl.constexpr, ROWS: tl.constexpr, MIN_SCALE: tl.constexpr,
    PAIRS: tl.constexpr, HARDWARE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scale byte (int32 [ROWS]) of blocks with maxima amax; 4over6 looks at the elements (tiles x0 and x1) too."""
    if CHAIN == "mse" or CHAIN == "mae":
        x0 = widen_tile(x0, ROWS, PAIRS)
        x1 = widen_tile(x1, ROWS, PAIRS)
        return four_or_six(x0, x1, amax, g, CHAIN, ROWS, HARDWARE)
    return block_scale(amax, g, like_ptr, CHAIN, MIN_SCALE, HARDWARE, INTERPRET)
