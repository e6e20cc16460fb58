"""Blocks of bf16 as they are loaded, two elements a register: what is cheaper there than on their fp32 values.

A tile is eight elements a row: int32 [ROWS, 4], element 2i in the low half of register i. The maximum takes one
instruction for two elements, the signs six for eight. The assembly does not run in Triton's interpreter; the same
things on fp32 tiles are in `rounding`.
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
def load_pairs(ptr, offset, mask):
    """Tile of bf16 from element `offset` [ROWS] (even)."""
    at = ptr.to(tl.pointer_type(tl.int32)) + (offset // 2)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(at, mask=mask[:, None], other=0)


@jit
def widen_pairs(tile, ROWS: tl.constexpr):
    """fp32 [ROWS, 8] of a tile."""
    even = (tile << 16).to(tl.float32, bitcast=True)
    odd = (tile & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(even, odd), (ROWS, 8))


@jit
def larger_pairs(a, b):
    """Magnitudes of each half, the larger ones, under any sign; NaN if either is."""
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@jit
def split_pairs(tile, ROWS: tl.constexpr):
    """The four registers of a tile, each [ROWS], in order."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def maximum_of_pairs(tile, ROWS: tl.constexpr):
    """max |x| of each row of a tile (or of `larger_pairs` of several), fp32; NaN if there is one."""
    first, second, third, fourth = split_pairs(tile, ROWS)
    pair = larger_pairs(larger_pairs(first, second), larger_pairs(third, fourth))
    low = tl.abs((pair << 16).to(tl.float32, bitcast=True))
    high = tl.abs((pair & -65536).to(tl.float32, bitcast=True))
    return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@jit
def add_signs(word, tile, ROWS: tl.constexpr):
    """int32 words [ROWS] of eight magnitude codes, element j in bits 4j..4j+2, with the sign of each in bit 4j+3."""
    first, second, third, fourth = split_pairs(tile, ROWS)
    return tl.inline_asm_elementwise(
        _SIGNS, "=r,r,r,r,r,r", [word, first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1
    )
