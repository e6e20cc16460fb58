"""Guided rounding (bracket) counted in codes instead of values: fewer instructions, for every number of bits.

Times 2^-126, an E2M1 magnitude is an fp32 whose bits are its code << 22: E2M1's subnormals become fp32's, and one
mantissa bit is left. So a product rounded down, under a mask, is the bracket's lower end; a product rounded up, plus
all bits below the mask, is its upper end, which is the same where |z| is on the grid.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl

_PRODUCTS = tl.constexpr(
    "{ .reg .f32 t; mul.rz.f32 t, $2, 0f00800000; mov.b32 $0, t; mul.rp.f32 t, $2, 0f00800000; mov.b32 $1, t; }"
)
# In Triton's own operators the compiler makes a shift and a selection of the parity's test.
_ONE_BIT = tl.constexpr("""{
    .reg .pred p; .reg .b32 u;
    lop3.b32 u, $1, $3, 0x400000, 0x28;
    setp.ne.b32 p, u, 0;
    and.b32 u, $1, 0x01700000;
    setp.ne.and.b32 p, u, 0x01000000, p;
    mov.b32 u, $1;
    @p add.s32 u, $2, 0x3FFFFF;
    and.b32 $0, u, 0xFFC00000;
}""")


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
def placed(word, BITS: tl.constexpr):
    """Codes [ROWS, 8] where `guided_floor` wants them, of int32 [ROWS] with eight low-bit codes: one shift a code."""
    first: tl.constexpr = 28 if BITS == 4 else 22
    return word[:, None] << (first - tl.arange(0, 8) * BITS)[None, :]


@jit
def guided_floor(z, codes, BITS: tl.constexpr, INTERPRET: tl.constexpr):
    """|q*| * 2^-126 of fp32 z under low-bit codes, as `guided_values` has it; BITS 1 to 4. Codes int32: the code from
    bit 22 on (4 bits: 28) and anything in the other bits."""
    a = tl.minimum(tl.abs(z), 6.0)
    t, up = scaled(a, INTERPRET)
    if BITS == 1 and not INTERPRET:
        q = tl.inline_asm_elementwise(_ONE_BIT, "=r,r,r,r", [t, up, codes], dtype=tl.int32, is_pure=True, pack=1)
        return q.to(tl.float32, bitcast=True)
    if BITS == 1:
        # [2, 2.25) and [4, 4.5): the record's class has a nearer member on the bracket's other side
        upper = (((t ^ codes) & 0x400000) != 0) & ((t & 0x01700000) != 0x01000000)
    elif BITS == 4:  # a target of the other sign is below every end
        upper = (((codes & -268435456) ^ (z.to(tl.int32, bitcast=True) & -2147483648)) >> 6) > t
    else:
        target = codes & (((1 << BITS) - 1) << 22)
        if BITS == 2:  # the class is {c, c + 4}; c/2 is the smaller's magnitude
            half = target.to(tl.float32, bitcast=True) * 8.507059173023462e37
            middle = tl.maximum(tl.fma(half, 1.5, 1.0), half * 2.5)
            target = tl.where(a > middle, target + 0x01000000, target)
        upper = target > t
    return (tl.where(upper, up + 0x3FFFFF, t) & -4194304).to(tl.float32, bitcast=True)
