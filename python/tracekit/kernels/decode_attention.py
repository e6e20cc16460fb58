"""Decode attention of one query a sequence over a paged pool, split over the context: the parts that any pool needs.

Each program takes one (sequence, KV head, split) and leaves a normalised output and the log2 of its sum of exp2; the
merge weighs the splits. The bf16 kernel here is what kernels over packed pools are measured against.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tracekit.kernels._triton import INTERPRET, cdiv, jit, tl

LOG2_E = 1.4426950408889634


@jit
def split_size(length, n_splits, split_tokens, tile):
    """Tokens a split: `split_tokens`, or if 0 the sequence's share of `n_splits`, whole tiles and four at least."""
    own = tl.maximum(((length + n_splits - 1) // n_splits + tile - 1) // tile * tile, 4 * tile)
    return tl.where(split_tokens > 0, split_tokens, own)


@jit
def _bf16_split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, lse_ptr, factor, table_stride, n_splits,
    split_tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same over a bf16 (or fp16) pool [slots, HEADS, D]."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    sequence = pair // HEADS
    head = pair % HEADS
    ROWS: tl.constexpr = 16 if GROUP < 16 else GROUP
    length = tl.load(length_ptr + sequence)
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, length)
    g = tl.arange(0, ROWS)
    rows_ok = g < GROUP
    row = (sequence * HEADS + head) * GROUP + g
    d = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=rows_ok[:, None], other=0.0).to(k_ptr.dtype.element_ty)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(first, last, TILE):
        n = start + tl.arange(0, TILE)
        ok = n < last
        page = tl.load(table_ptr + sequence * table_stride + n // PAGE, mask=ok, other=0).to(tl.int64)
        base = (page * PAGE + n % PAGE) * HEADS + head
        k = tl.load(k_ptr + base[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        v = tl.load(v_ptr + base[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * factor
        s = tl.where(ok[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(k_ptr.dtype.element_ty), v, acc * shrink[:, None])
        top = new_top
    if first < length:
        part = row * n_splits + split
        tl.store(out_ptr + part[:, None] * D + d[None, :], acc * (1.0 / total)[:, None], mask=rows_ok[:, None])
        tl.store(lse_ptr + part, top + tl.log2(total), mask=rows_ok)


@jit
def _merge_kernel(
    part_ptr, lse_ptr, length_ptr, out_ptr, factor, n_splits, split_tokens, tile,
    ROWS_PER_SEQUENCE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one query head by exp2 of their log-sums."""
    row = tl.program_id(0)
    length = tl.load(length_ptr + row // ROWS_PER_SEQUENCE).to(tl.int32)
    split_tokens = split_size(length, n_splits, split_tokens, tile)
    d = tl.arange(0, D)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in range(0, (length + split_tokens - 1) // split_tokens):
        lse = tl.load(lse_ptr + row * n_splits + split)
        part = tl.load(part_ptr + (row * n_splits + split) * D + d)
        new_top = tl.maximum(top, lse)
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        top = new_top
    out = tl.where(total > 0, acc * (factor / tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty))


@functools.lru_cache(1024)  # a decode step asks once a layer
def choose_splits(sequences: int, kv_heads: int, longest: int, slots: int, tile: int) -> tuple[int, int]:
    """(splits, tokens a split): whole tiles, four at least, such that programs fill whole rounds of `slots`.

    `slots` programs run at once. A round costs the tokens of a split and what starting and merging one costs, taken as
    two tiles; of numbers of splits that cost the same within 2 %, the smallest.
    """
    least = 4 * tile
    best, least_cost = (1, max(cdiv(longest, tile) * tile, least)), float("inf")
    for wanted in range(1, max(1, cdiv(longest, least)) + 1):
        tokens = max(cdiv(cdiv(longest, wanted), tile) * tile, least)
        n = max(1, cdiv(longest, tokens))
        cost = cdiv(sequences * kv_heads * n, slots) * (tokens + 2 * tile)
        if cost < 0.98 * least_cost:
            best, least_cost = (n, tokens), cost
        if sequences * kv_heads * n > 8 * slots:
            break
    return best


def split_buffers(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Outputs [B * Hq * splits, D] and log-sums [B * Hq * splits] of the splits, fp32, for q [B, Hq, D]."""
    b, hq, d = q.shape
    part = torch.empty(b * hq * splits, d, dtype=torch.float32, device=q.device)
    return part, part.new_empty(b * hq * splits)


def launch_merge(
    q: Tensor, part: Tensor, lse: Tensor, lengths: Tensor, splits: int, tokens: int, factor: float, tile: int = 1
) -> Tensor:
    """Merge the splits, as `split_size` has them, times `factor`: [B, Hq, D] in q's dtype."""
    b, hq, d = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _merge_kernel[(b * hq,)](
        part, lse, lengths, out, factor, splits, tokens, tile, ROWS_PER_SEQUENCE=hq, D=d, num_warps=1
    )  # fmt: skip
    return out


def reference_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Float64 attention of one query a sequence: q [B, Hq, D], k and v [B, N, Hkv, D], lengths [B] -> [B, Hq, D]."""
    group = q.shape[1] // k.shape[2]
    k64, v64 = (t.double().repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bhd,bnhd->bhn", q.double(), k64) * scale
    outside = torch.arange(k.shape[1], device=q.device)[None, None, :] >= lengths[:, None, None]
    p = torch.nan_to_num(scores.masked_fill(outside, float("-inf")).softmax(-1))
    return torch.einsum("bhn,bnhd->bhd", p, v64)


def gather_pages(pool: Tensor, table: Tensor, page: int, longest: int) -> Tensor:
    """Rows of a pool [slots, ...] in sequence order: table [B, pages] -> [B, longest, ...]."""
    slots = (table.long()[:, :, None] * page + torch.arange(page, device=table.device)).flatten(1)[:, :longest]
    return pool[slots]


def launch_bf16(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, page: int, scale: float, longest: int,
    tile: int = 64, warps: int = 4, stages: int = 3, splits: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Attention over pools [slots, Hkv, D] of bf16 or fp16; `splits` is (number, tokens each)."""
    b, hq, d = q.shape
    heads = k.shape[1]
    n, tokens = splits or choose_splits(b, heads, longest, 3 * processors(q), tile)
    part, lse = split_buffers(q, n)
    _bf16_split_kernel[(b * heads, n)](
        q.contiguous(), k, v, table, lengths, part, lse, scale * LOG2_E, table.stride(0), n, tokens,
        HEADS=heads, GROUP=hq // heads, D=d, PAGE=page, TILE=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return launch_merge(q, part, lse, lengths, n, tokens, 1.0)


def processors(x: Tensor) -> int:
    if INTERPRET or x.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count
