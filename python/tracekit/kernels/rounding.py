"""Device functions shared by the kernels: E2M1 and E4M3 rounding, packing. (Loads: `tiles`; scales: `chains`.)

Every function has one meaning on the GPU and in the interpreter: no contraction (kernels launch with
`enable_fp_fusion=False`; `tl.fma` is used only where the product is exact), no approximate division.

E2M1 to nearest costs three additions and three minima. With M = 1.5 * 2^23, fp32 `2a + M`, `a + M + 2` and
`a/2 + M + 4` are M plus the code of `a` rounded in the binades [0, 2], [2, 4], [4, 6] (ties to even in all three,
because 2 and 4 are even); the code is concave in `a`, so the right one is the smallest.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl


@jit
def _bits(v):
    return v.to(tl.int32, bitcast=True)


@jit
def e2m1_round(
    x, inverse, DIVIDE: tl.constexpr, TIES_AWAY: tl.constexpr, KEEP_MINUS_ZERO: tl.constexpr, CAREFUL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """z, fp32 x times (or, DIVIDE, over) inverse -> (M + 4 + magnitude code as int32 bits, z or its sign).

    M = 1.5 * 2^23. CAREFUL takes products of 7 and above (saturation) and NaN (which counts as +6); without it there
    may be neither. A GPU's product with a NaN is the positive canonical NaN, which is above all other numbers as
    an integer too, so only the interpreter has to replace it.
    """
    if CAREFUL:
        x = tl.div_rn(x, inverse) if DIVIDE else x * inverse
        if INTERPRET:
            x = tl.where(x != x, 6.0, x)
        a = tl.abs(x)
    elif DIVIDE:
        x = tl.div_rn(x, inverse)
        a = tl.abs(x)
    else:
        a = tl.abs(x) * inverse
        if not KEEP_MINUS_ZERO:  # a product may underflow to -0
            x = x * inverse
    if TIES_AWAY:  # an odd last bit lifts a midpoint above itself
        a = (a.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    if not KEEP_MINUS_ZERO:
        x = x + 0.0
    # Positive numbers compare as integers do, of which the least of three is one instruction.
    r = tl.minimum(_bits(tl.fma(a, 2.0, 12582916.0)), _bits(a + 12582918.0))
    r = tl.minimum(r, _bits(tl.fma(a, 0.5, 12582920.0)))
    if CAREFUL:
        r = tl.minimum(r, 0x4B40000B)
    return r, x


@jit
def signed_code(rounded, z, four_bits):
    """Bits of M + code from M + 4 + magnitude code, the sign of fp32 z in bit 3. `four_bits` is 0x40800000 (4.0) at run
    time: as a constant the compiler needs two instructions."""
    four = ((_bits(z) & -2147483648) | four_bits).to(tl.float32, bitcast=True)
    return _bits(rounded.to(tl.float32, bitcast=True) - four)


@jit
def e2m1_magnitude(code):
    """Magnitude of an fp32 code 0..7: code/2, code - 2, 2 code - 8 in turn; convex, so the largest."""
    return tl.maximum(tl.maximum(code * 0.5, code - 2.0), tl.fma(code, 2.0, -8.0))


@jit
def with_sign(magnitude, z):
    """magnitude with its sign flipped where z is negative."""
    sign = z.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@jit
def e2m1_nearest(z):
    """fp32 z rounded to E2M1: ties to even, saturating, NaN to +6, negatives that round to zero to +0."""
    z = tl.where(z != z, 6.0, z)
    a = tl.minimum(tl.abs(z), 6.0)
    binade = tl.maximum((a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    q = tl.fma(binade, -6291456.0, tl.fma(binade, 6291456.0, a))
    return tl.where(z < 0.0, -q, q) + 0.0


@jit
def pack_words(bits, ROWS: tl.constexpr, FIRST: tl.constexpr):
    """Bits of M + FIRST + code, int32 [ROWS, 8] -> words [ROWS], element j in bits 4j..4j+3; FIRST is 0 or 4.

    Each step adds one shifted operand (one instruction); what M + FIRST leaves comes off at the end.
    """
    low, high = tl.split(tl.reshape(bits, (ROWS, 4, 2)))
    low, high = tl.split(tl.reshape(low + (high << 4), (ROWS, 2, 2)))
    low, high = tl.split(tl.reshape(low + (high << 8), (ROWS, 2)))
    return low + (high << 16) - (1061158912 if FIRST == 0 else -2088483772)


@jit
def keep_low_bits(word, BITS: tl.constexpr):
    """The low BITS (1, 2, 3) bits of each of a word's eight nibbles, packed: int32 -> uint32 of 8 * BITS bits."""
    w = word.to(tl.uint32, bitcast=True)
    if BITS == 1:
        w = w & 0x11111111
        w = (w | (w >> 3)) & 0x03030303
        w = (w | (w >> 6)) & 0x000F000F
        w = (w | (w >> 12)) & 0xFF
    elif BITS == 2:
        w = w & 0x33333333
        w = (w | (w >> 2)) & 0x0F0F0F0F
        w = (w | (w >> 4)) & 0x00FF00FF
        w = (w | (w >> 8)) & 0xFFFF
    elif BITS == 3:
        w = (w & 0x07070707) | ((w >> 1) & 0x38383838)
        w = (w & 0x003F003F) | ((w >> 2) & 0x0FC00FC0)
        w = (w & 0x00000FFF) | ((w >> 4) & 0x00FFF000)
    return w


@jit
def store_low_bits(ptr, index, first, second, mask, BITS: tl.constexpr):
    """Write the low bits of sixteen number `index`, two words, to `ptr`: int32 for 2 and 4 bits, else uint16."""
    if BITS == 4:
        both = tl.join(first, second)
        tl.store(ptr + index[:, None] * 2 + tl.arange(0, 2)[None, :], both, mask=mask[:, None])
    elif BITS == 3:
        both = keep_low_bits(first, 3).to(tl.int64) | (keep_low_bits(second, 3).to(tl.int64) << 24)
        for i in tl.static_range(3):
            tl.store(ptr + index * 3 + i, ((both >> (16 * i)) & 0xFFFF).to(tl.uint16), mask=mask)
    else:
        both = keep_low_bits(first, BITS) | (keep_low_bits(second, BITS) << (8 * BITS))
        tl.store(ptr + index, both.to(ptr.dtype.element_ty), mask=mask)


@jit
def load_low_bits(ptr, index, mask, BITS: tl.constexpr):
    """What `store_low_bits` wrote: two words (int32), eight codes each from bit 0 on, anything above them."""
    if BITS == 4:
        both = tl.load(ptr + index[:, None] * 2 + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0)
        return tl.split(both)
    elif BITS == 3:
        low = tl.load(ptr + index * 3, mask=mask, other=0).to(tl.int32)
        middle = tl.load(ptr + index * 3 + 1, mask=mask, other=0).to(tl.int32)
        high = tl.load(ptr + index * 3 + 2, mask=mask, other=0).to(tl.int32)
        return low | (middle << 16), (middle >> 8) | (high << 8)
    else:
        both = tl.load(ptr + index, mask=mask, other=0).to(tl.int32)
        return both, both >> (8 * BITS)


# One value a conversion, straight to a word: of Triton's cast, two a conversion and then taken apart, ptxas 12.8 and
# 12.9 lose the shift that fetches the second byte (sm_90; wrong scales of every other row, wrong codes).
_ENCODE_E4M3 = tl.constexpr(
    "{ .reg .b16 h; .reg .f32 z; mov.f32 z, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 h, z, $1; cvt.u32.u16 $0, h; }"
)


@jit
def e4m3_encode(v, HARDWARE: tl.constexpr):
    """E4M3 byte (as int32) of v >= 0: nearest, ties to even, saturating at 448."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_ENCODE_E4M3, "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1)
    v = tl.minimum(v, 448.0)
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (v + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # at 2^14 the last bit weighs 2^-9
    return tl.where(v < 0.015625, subnormal, normal)


@jit
def e4m3_decode(byte):
    """fp32 value of a positive E4M3 byte (int32); 0x7F, the mark of a missing block, comes back as 480."""
    # As bits of an fp32 it is 2^120 times too small, E4M3's subnormals among fp32's.
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@jit
def widen(v, INTERPRET: tl.constexpr):
    """v in fp32 (the interpreter's cast from bf16 is wrong for subnormals)."""
    if INTERPRET and v.dtype == tl.bfloat16:
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@jit
def narrow(v, ptr, INTERPRET: tl.constexpr):
    """fp32 v in the element type of `ptr`, to nearest even (the interpreter's cast to bf16 truncates)."""
    if INTERPRET and ptr.dtype.element_ty == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(ptr.dtype.element_ty)
