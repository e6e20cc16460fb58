"""Guided rounding (bracket) counted in codes instead of values: fewer instructions, for every number of bits.

Times 2^-126, an E2M1 magnitude is an fp32 whose bits are its code << 22: E2M1's subnormals become fp32's, and one
mantissa bit is left. So a product rounded down has the code of the bracket's lower end on top, and the end itself under
a mask; the upper end is one code on. A product rounded up is above the lower end exactly where |z| is.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl

_PRODUCTS = tl.constexpr(
    "{ .reg .f32 t; mul.rz.f32 t, $2, 0f00800000; mov.b32 $0, t; mul.rp.f32 t, $2, 0f00800000; mov.b32 $1, t; }"
)


@jit
def scaled(a, INTERPRET: tl.constexpr):
    """Bits (int32) of a * 2^-126 rounded down and rounded up, for fp32 a in [0, 6]."""
    if INTERPRET:
        whole = (a * 8388608.0).to(tl.int32)  # times 2^-126, a below 1 has this many units of 2^-149
        more = (whole.to(tl.float32) != a * 8388608.0).to(tl.int32)
        normal = a.to(tl.int32, bitcast=True) - 0x3F000000
        return tl.where(a < 1.0, whole, normal), tl.where(a < 1.0, whole + more, normal)
    else:
        return tl.inline_asm_elementwise(_PRODUCTS, "=r,=r,f", [a], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)


@jit
def guided_floor(z, codes, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """|q*| of fp32 z under low-bit codes int32 (masked, but for one bit), as `guided_values` has it; BITS 1 to 4."""
    a = tl.minimum(tl.abs(z), 6.0)
    t, up = scaled(a, INTERPRET)
    low = t & -4194304
    if BITS == 1:
        step = (t ^ (codes << 22)) & 0x400000
        # [2, 2.25) and [4, 4.5): the record's class has a nearer member on the bracket's other side
        moves = (up > low) & ((t & 0x7F700000) != 0x01000000)
        q = low + tl.where(moves, step, 0)
    else:
        target = codes << 22
        if BITS == 2:  # the class is {c, c + 4}; c/2 is the smaller's magnitude
            half = target.to(tl.float32, bitcast=True) * 8.507059173023462e37
            middle = tl.maximum(tl.fma(half, 1.5, 1.0), half * 2.5)
            target = tl.where(a > middle, target + 0x01000000, target)
        elif BITS == 4:
            target = target & 0x01C00000
            opposite = (z.to(tl.int32, bitcast=True) ^ (codes << 28)) < 0
            target = tl.where(opposite, 0, target)
        q = tl.where(tl.minimum(target, up) > low, low + 0x400000, low)
    return q.to(tl.float32, bitcast=True) * 8.507059173023462e37
