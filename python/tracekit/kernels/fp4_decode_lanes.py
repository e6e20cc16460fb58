"""Decode attention over a paged FP4 pool, one warp a program: decoded operands stay in the lanes that decoded them.

Scores are K q^T and outputs V^T p^T, so the tile fills the tensor core's 16 rows and the heads of a group its 8
columns. The running sum of p is kept a lane each and reduced once, at the end. Whole tiles run without masks; where
pages are whole tiles too (`PAGE % TILE == 0`), a tile has one page number, loaded a tile ahead.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl
from tracekit.kernels.decode_attention import split_size
from tracekit.kernels.fp4_expand import expand_keys, expand_values, key_channels, value_channels


@jit
def _page_of(table_ptr, n, PAGE: tl.constexpr, SLOTS: tl.constexpr):
    """Page number of token n, a scalar: the table has one a page, or the slot of each token."""
    if SLOTS:
        return tl.load(table_ptr + n) // PAGE
    else:
        return tl.load(table_ptr + n // PAGE)


@jit
def _rows_of(n, last, number, table_ptr, head, HEADS: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
             SLOTS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Rows of the pool that hold tokens n of one head: page `number` if a tile is within a page, else by the table."""
    if WHOLE:
        return (number.to(tl.int64) * PAGE + n % PAGE) * HEADS + head
    else:
        at = table_ptr + (n if SLOTS else n // PAGE)
        entry = tl.load(at, mask=n < last, other=0) if MASKED else tl.load(at)
        slot = entry.to(tl.int64) if SLOTS else entry.to(tl.int64) * PAGE + n % PAGE
        return slot * HEADS + head


@jit
def _load(codes_ptr, scales_ptr, row, ok, D: tl.constexpr, MASKED: tl.constexpr):
    """Words int32 [N, D/8] and scale bytes int32 [N, D/16] of pool rows [N]; zero where not ok."""
    word_at = codes_ptr + row[:, None] * (D // 8) + tl.arange(0, D // 8)[None, :]
    byte_at = scales_ptr + row[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :]
    if MASKED:
        word = tl.load(word_at, mask=ok[:, None], other=0)
        byte = tl.load(byte_at, mask=ok[:, None], other=0)
    else:
        word = tl.load(word_at)
        byte = tl.load(byte_at)
    return word, byte.to(tl.int32)


@jit
def _tile(
    q, top, total, acc, start, last, number, factor, kc_ptr, ks_ptr, vc_ptr, vs_ptr, table_ptr, head,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, DECODE: tl.constexpr,
    SLOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to tokens [start, min(start + TILE, last)): the new (top [ROWS], total [TILE, ROWS], acc [D, ROWS])."""
    WHOLE: tl.constexpr = PAGE % TILE == 0
    n = start + tl.arange(0, TILE)
    even = start + 2 * tl.arange(0, TILE // 2)
    row = _rows_of(n, last, number, table_ptr, head, HEADS, PAGE, WHOLE, SLOTS, MASKED)
    even_row = _rows_of(even, last, number, table_ptr, head, HEADS, PAGE, WHOLE, SLOTS, MASKED)
    if PAGE % 2 == 0:
        odd_row = even_row + HEADS
    else:
        odd_row = _rows_of(even + 1, last, number, table_ptr, head, HEADS, PAGE, WHOLE, SLOTS, MASKED)
    word, byte = _load(kc_ptr, ks_ptr, row, n < last, D, MASKED)
    even_word, even_byte = _load(vc_ptr, vs_ptr, even_row, even < last, D, MASKED)
    odd_word, odd_byte = _load(vc_ptr, vs_ptr, odd_row, even + 1 < last, D, MASKED)
    s = tl.dot(expand_keys(word, byte, TILE, D, DECODE), q)
    if MASKED:
        s = tl.where((n < last)[:, None], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=0) * factor)
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s * factor - new_top[None, :])
    v = expand_values(even_word, odd_word, even_byte, odd_byte, TILE, D, DECODE)
    acc = tl.dot(v, p.to(tl.float16), acc * shrink[None, :])
    return new_top, total * shrink[None, :] + p, acc


@jit
def lanes_split_kernel(
    q_ptr, kc_ptr, ks_ptr, vc_ptr, vs_ptr, table_ptr, rows_ptr, length_ptr, out_ptr, lse_ptr, factor, table_stride,
    n_splits, split_tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, DECODE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One (sequence, KV head, split); `factor` > 0, and split_tokens is whole tiles or 0 (`split_size`). With SLOTS the
    sequence has row `rows_ptr[sequence]` of the table, which holds slots of tokens."""
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    if SLOTS:
        table_ptr += tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    else:
        table_ptr += sequence * table_stride
    length = tl.load(length_ptr + sequence).to(tl.int32)
    split_tokens = split_size(length, n_splits, split_tokens, TILE)
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, length)
    g = tl.arange(0, ROWS)
    rows_ok = g < GROUP
    row = (sequence * HEADS + head) * GROUP + g
    at = row[None, :] * D + key_channels(D, DECODE)[:, None]
    q = tl.load(q_ptr + at, mask=rows_ok[None, :], other=0.0).to(tl.float16)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE, ROWS), tl.float32)
    acc = tl.zeros((D, ROWS), tl.float32)
    if first < length:
        whole = first + (last - first) // TILE * TILE
        number = _page_of(table_ptr, first, PAGE, SLOTS)
        for start in range(first, whole, TILE):
            following = _page_of(table_ptr, tl.minimum(start + TILE, length - 1), PAGE, SLOTS)
            top, total, acc = _tile(q, top, total, acc, start, last, number, factor, kc_ptr, ks_ptr, vc_ptr, vs_ptr,
                                    table_ptr, head, HEADS, D, PAGE, TILE, DECODE, SLOTS, False)  # fmt: skip
            number = following
        if whole < last:
            top, total, acc = _tile(q, top, total, acc, whole, last, number, factor, kc_ptr, ks_ptr, vc_ptr, vs_ptr,
                                    table_ptr, head, HEADS, D, PAGE, TILE, DECODE, SLOTS, True)  # fmt: skip
        sums = tl.sum(total, axis=0)
        part = row * n_splits + split
        at = part[None, :] * D + value_channels(D)[:, None]
        tl.store(out_ptr + at, acc * (1.0 / sums)[None, :], mask=rows_ok[None, :])
        tl.store(lse_ptr + part, top + tl.log2(sums), mask=rows_ok)
