"""Tiles of eight elements a row, as kernels load them; the maximum of a block of tiles.

PAIRS: bf16 two elements a register, int32 [ROWS, 4], element 2i in the low half of register i; else fp32 [ROWS, 8]. In
pairs the maximum takes one instruction for two elements and the signs six for eight. Their assembly does not run in
Triton's interpreter, which takes what fp32 tiles do.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl

# The larger magnitude of two pairs, with some sign; NaN (0x7FFF) where there is one.
_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
# prmt's 8 | i is the sign of byte i eight times: bytes of signs, even elements' and odd ones' apart.
_SIGNS = tl.constexpr("""{
    .reg .b32 a, b, even, odd;
    prmt.b32 a, $2, $3, 0xFBD9;
    prmt.b32 b, $4, $5, 0xFBD9;
    prmt.b32 even, a, b, 0x5410;
    prmt.b32 odd, a, b, 0x7632;
    lop3.b32 even, even, 0x08080808, $1, 0xEA;
    lop3.b32 $0, odd, 0x80808080, even, 0xEA;
}""")


@jit
def load_tile(ptr, offset, mask, PAIRS: tl.constexpr):
    """Eight elements of each row from element `offset` [ROWS] (PAIRS: even, of bf16)."""
    if PAIRS:
        at = ptr.to(tl.pointer_type(tl.int32)) + (offset // 2)[:, None] + tl.arange(0, 4)[None, :]
        return tl.load(at, mask=mask[:, None], other=0)
    else:
        return tl.load(ptr + offset[:, None] + tl.arange(0, 8)[None, :], mask=mask[:, None], other=0.0).to(tl.float32)


@jit
def _halves(pair):
    """fp32 of the low and of the high half."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@jit
def widen_tile(tile, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """fp32 [ROWS, 8] of a tile."""
    if PAIRS:
        even, odd = _halves(tile)
        return tl.reshape(tl.join(even, odd), (ROWS, 8))
    else:
        return tile


@jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _absolute_maximum(x, SKIP_NAN: tl.constexpr, INTERPRET: tl.constexpr):
    """max |x| along axis 1; NaN if there is one, unless SKIP_NAN. (Interpreters differ in what tl.max does.)"""
    a = tl.abs(x)
    if INTERPRET:
        nan = tl.max((a != a).to(tl.int32), axis=1)
        a = tl.max(tl.where(a != a, 0.0, a), axis=1)
        return a if SKIP_NAN else tl.where(nan > 0, float("nan"), a)
    if SKIP_NAN:
        return tl.maximum(tl.max(a, axis=1), 0.0)  # of nothing but NaN the maximum is NaN
    return tl.reduce(a, 1, _larger_or_nan)


@jit
def _larger_pairs(a, b):
    """Magnitudes of each half, the larger ones, under any sign; NaN if either is."""
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@jit
def _split_pairs(tile, ROWS: tl.constexpr):
    """The four registers of a tile, each [ROWS], in order."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _maximum_of_pairs(tile, ROWS: tl.constexpr):
    """max |x| of each row of a tile (or of `_larger_pairs` of several), fp32; NaN if there is one."""
    first, second, third, fourth = _split_pairs(tile, ROWS)
    pair = _larger_pairs(_larger_pairs(first, second), _larger_pairs(third, fourth))
    low, high = _halves(pair)
    return _larger_or_nan(tl.abs(low), tl.abs(high))


@jit
def _tiles_maximum(
    x0, x1, SKIP_NAN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    first = _absolute_maximum(widen_tile(x0, ROWS, PAIRS), SKIP_NAN, INTERPRET)
    return _larger_or_nan(first, _absolute_maximum(widen_tile(x1, ROWS, PAIRS), SKIP_NAN, INTERPRET))


@jit
def block_maximum(
    x0, x1, x2, x3, SKIP_NAN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    HARDWARE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """max |x| of each block, of tiles x0 and x1, and for blocks of 32 x2 and x3; NaN if there is one or, SKIP_NAN, not
    counted."""
    if PAIRS and HARDWARE and not SKIP_NAN:
        pairs = _larger_pairs(x0, x1)
        if BLOCK == 32:
            pairs = _larger_pairs(pairs, _larger_pairs(x2, x3))
        return _maximum_of_pairs(pairs, ROWS)
    amax = _tiles_maximum(x0, x1, SKIP_NAN, ROWS, PAIRS, INTERPRET)
    if BLOCK == 32:
        amax = _larger_or_nan(amax, _tiles_maximum(x2, x3, SKIP_NAN, ROWS, PAIRS, INTERPRET))
    return amax


@jit
def add_signs(word, tile, ROWS: tl.constexpr):
    """int32 words [ROWS] of eight magnitude codes, element j in bits 4j..4j+2, with the sign of each in bit 4j+3."""
    first, second, third, fourth = _split_pairs(tile, ROWS)
    return tl.inline_asm_elementwise(
        _SIGNS, "=r,r,r,r,r,r", [word, first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1
    )
