"""Rows that blocks do not divide: where their pieces lie, and loads and stores that stop at a row's end.

Rows of such a tensor, of its packed codes and of its low bits begin at any byte, so that a tile of eight elements is
read element by element and written byte by byte. What a kernel does with whole blocks is another compile-time branch.
"""

from __future__ import annotations

from tracekit.kernels._triton import cdiv, jit, tl
from tracekit.kernels.rounding import keep_low_bits, widen


def blocks_of(shape: tuple[int, ...], block: int) -> int:
    """Blocks of rows [..., K], each row's last one short where `block` does not divide K."""
    n = cdiv(shape[-1], block)
    for size in shape[:-1]:
        n *= size
    return n


@jit
def place(block, length, BLOCK: tl.constexpr):
    """(row, first element within the row) of block number `block` of rows of `length` elements."""
    per_row = (length + BLOCK - 1) // BLOCK
    return block // per_row, block % per_row * BLOCK


@jit
def load_partial(ptr, offset, left, mask, INTERPRET: tl.constexpr):
    """Eight elements of each row from `offset` [ROWS] as fp32 [ROWS, 8]; zero from the `left`-th on."""
    j = tl.arange(0, 8)[None, :]
    return widen(tl.load(ptr + offset[:, None] + j, mask=mask[:, None] & (j < left[:, None]), other=0.0), INTERPRET)


@jit
def _store_bytes(ptr, at, word, bits, mask, BYTES: tl.constexpr):
    """Those of the low BYTES bytes of int64 `word` that hold any of its first `bits` bits, from byte `at`."""
    for i in tl.static_range(BYTES):
        tl.store(ptr + at + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask & (bits > 8 * i))


@jit
def store_codes(packed_ptr, packed_at, low_ptr, low_at, word, left, mask, BITS: tl.constexpr):
    """A tile's codes (eight nibbles, int32) and their low BITS bits, the first `left` elements of them.

    Bits beyond a row's last element are zero, in its last byte too.
    """
    kept = tl.minimum(tl.maximum(left, 0), 8)
    whole = word.to(tl.int64) & ((tl.full(word.shape, 1, tl.int64) << (4 * kept)) - 1)
    _store_bytes(packed_ptr, packed_at, whole, 4 * left, mask, 4)
    if BITS == 4:
        _store_bytes(low_ptr, low_at, whole, 4 * left, mask, 4)
    elif BITS > 0:
        _store_bytes(low_ptr, low_at, keep_low_bits(whole.to(tl.int32), BITS).to(tl.int64), BITS * left, mask, BITS)


@jit
def load_codes(low_ptr, at, left, mask, BITS: tl.constexpr):
    """Low-bit codes int32 [ROWS, 8] of the `left` elements from byte `at`; bits above a code's own are to be masked."""
    word = tl.zeros(left.shape, tl.int32)
    for i in tl.static_range(BITS):
        byte = tl.load(low_ptr + at + i, mask=mask & (BITS * left > 8 * i), other=0).to(tl.int32)
        word = word | (byte << (8 * i))
    codes = word[:, None] >> (tl.arange(0, 8) * BITS)[None, :]
    return codes if BITS == 1 else codes & ((1 << BITS) - 1)
