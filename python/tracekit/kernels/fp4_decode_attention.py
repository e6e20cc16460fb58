"""Decode attention over a paged FP4 pool: one query a sequence, grouped heads, split over the context.

The pool holds codes and scales as the write kernel left them and is never expanded: a thread unpacks the words it
has loaded. Two nibbles four places apart become the halves of one register with two shifts and two masks, so channel
`8 w + e` of a head ends up at `8 w + reverse(e)` (three bits reversed); q and the output use the same order.

An E2M1 code shifted to the top of an fp16 is its value times 2^-14, an E4M3 byte likewise times 2^-8 (subnormals
too); value times scale times 2^-8 is exact in fp16 for every code and byte. The factor comes off in fp32 with the
softmax scale. Softmax and sums are fp32, products fp16 with fp32 accumulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, cdiv, jit, runs_triton, tl
from tracekit.numerics import dequantize
from tracekit.numerics.formats import unpack_codes
from tracekit.numerics.profiles import profile_info

PAIR_FACTOR = 256.0  # 2^8: what decoded values lack


@jit
def _halves(word, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Nibbles PLACE and PLACE + 4 of int32 words, each as the bits of fp16 value * 2^-14."""
    sign = word << (12 - 4 * PLACE)
    magnitude = word >> 3 if PLACE == 3 else word << (9 - 4 * PLACE)
    bits = (sign & -2147450880) | (magnitude & 0x0E000E00)
    if ASSEMBLY:  # naming the halves keeps the compiler from moving bytes to cut and rejoin them
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [bits], dtype=(tl.int16, tl.int16), is_pure=True, pack=1
        )
    return bits.to(tl.int16), (bits >> 16).to(tl.int16)


@jit
def _expand(word, scale, TILE: tl.constexpr, D: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words [TILE, D/8] and fp16 scales [TILE, D/16] -> fp16 [TILE, D], each word's channels in bit-reversed order."""
    low0, high0 = _halves(word, 0, ASSEMBLY)
    low1, high1 = _halves(word, 1, ASSEMBLY)
    low2, high2 = _halves(word, 2, ASSEMBLY)
    low3, high3 = _halves(word, 3, ASSEMBLY)
    low = tl.join(tl.join(low0, low1), tl.join(low2, low3))
    high = tl.join(tl.join(high0, high1), tl.join(high2, high3))
    codes = tl.reshape(tl.join(low, high), (TILE, D // 16, 16)).to(tl.float16, bitcast=True)
    return tl.reshape(codes * scale[:, :, None], (TILE, D))


@jit
def _channels(D: tl.constexpr):
    """The channel at each place of the expanded order."""
    i = tl.arange(0, D)
    return (i & -8) | ((i & 1) << 2) | (i & 2) | ((i >> 2) & 1)


@jit
def _scales_of(ptr, base, mask, BLOCKS: tl.constexpr):
    """fp16 scale * 2^6 of each block of 16 channels, [TILE, BLOCKS]."""
    byte = tl.load(ptr + base[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :], mask=mask[:, None], other=0)
    return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 16384.0


@jit
def _fp4_split_kernel(
    q_ptr, kc_ptr, ks_ptr, vc_ptr, vs_ptr, table_ptr, length_ptr, out_ptr, lse_ptr, factor, table_stride, n_splits,
    split_tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One (sequence, KV head, split): normalised output over its tokens, fp32, and log2 of its sum of exp2."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    sequence = pair // HEADS
    head = pair % HEADS
    WORDS: tl.constexpr = D // 8
    ROWS: tl.constexpr = 16 if GROUP < 16 else GROUP
    length = tl.load(length_ptr + sequence)
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, length)
    g = tl.arange(0, ROWS)
    rows_ok = g < GROUP
    row = (sequence * HEADS + head) * GROUP + g
    channel = _channels(D)
    q = tl.load(q_ptr + row[None, :] * D + channel[:, None], mask=rows_ok[None, :], other=0.0).to(tl.float16)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((D, ROWS), tl.float32)
    w = tl.arange(0, WORDS)
    for start in range(first, last, TILE):
        n = start + tl.arange(0, TILE)
        ok = n < last
        page = tl.load(table_ptr + sequence * table_stride + n // PAGE, mask=ok, other=0).to(tl.int64)
        base = (page * PAGE + n % PAGE) * HEADS + head
        word = tl.load(kc_ptr + base[:, None] * WORDS + w[None, :], mask=ok[:, None], other=0)
        k = _expand(word, _scales_of(ks_ptr, base, ok, D // 16), TILE, D, ASSEMBLY)
        s = tl.dot(k, q) * factor
        s = tl.where(ok[:, None], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=0))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[None, :])
        total = total * shrink + tl.sum(p, axis=0)
        word = tl.load(vc_ptr + base[:, None] * WORDS + w[None, :], mask=ok[:, None], other=0)
        v = _expand(word, _scales_of(vs_ptr, base, ok, D // 16), TILE, D, ASSEMBLY)
        acc = tl.dot(tl.trans(v), p.to(tl.float16), acc * shrink[None, :])
        top = new_top
    if first < length:
        part = row * n_splits + split
        tl.store(out_ptr + part[None, :] * D + channel[:, None], acc * (1.0 / total)[None, :], mask=rows_ok[None, :])
        tl.store(lse_ptr + part, top + tl.log2(total), mask=rows_ok)


@jit
def _bf16_split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, lse_ptr, factor, table_stride, n_splits,
    split_tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same over a bf16 (or fp16) pool [slots, HEADS, D]: what the FP4 kernel is measured against."""
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
    part_ptr, lse_ptr, length_ptr, out_ptr, factor, n_splits, split_tokens,
    ROWS_PER_SEQUENCE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one query head by exp2 of their log-sums."""
    row = tl.program_id(0)
    length = tl.load(length_ptr + row // ROWS_PER_SEQUENCE)
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


def choose_splits(sequences: int, kv_heads: int, longest: int, processors: int, tile: int) -> tuple[int, int]:
    """(splits, tokens a split): enough programs to fill the device about four times, whole tiles a split."""
    wanted = max(1, cdiv(8 * processors, sequences * kv_heads))
    tokens = max(cdiv(cdiv(longest, wanted), tile) * tile, 4 * tile)
    return cdiv(longest, tokens), tokens


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


@torch.library.custom_op("tracekit::fp4_decode_attention", mutates_args=())
def _fp4_decode_attention(
    q: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor, lengths: Tensor,
    page: int, scale: float, k_global: float, v_global: float, longest: int,
) -> Tensor:  # fmt: skip
    if not runs_triton(q):
        k, v = (
            gather_pages(
                dequantize(unpack_codes(c, q.shape[-1]), s, "nvfp4-exact", g, torch.float64), table, page, longest
            )
            for c, s, g in ((k_codes, k_scales, k_global), (v_codes, v_scales, v_global))
        )
        return reference_attention(q, k, v, lengths, scale).to(q.dtype)
    return launch_fp4(q, k_codes, k_scales, v_codes, v_scales, table, lengths, page, scale, k_global, v_global, longest)


@_fp4_decode_attention.register_fake
def _(q, k_codes, k_scales, v_codes, v_scales, table, lengths, page, scale, k_global, v_global, longest):
    return torch.empty_like(q)


def launch_fp4(
    q: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor, lengths: Tensor,
    page: int, scale: float, k_global: float, v_global: float, longest: int, tile: int = 64, warps: int = 4,
    stages: int = 3, splits: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Start the kernels; `splits` is (number, tokens each), chosen by size if absent."""
    b, hq, d = q.shape
    heads = k_codes.shape[1]
    n, tokens = splits or choose_splits(b, heads, longest, _processors(q), tile)
    part = torch.empty(b * hq * n, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(b * hq * n, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    log2e = 1.4426950408889634
    _fp4_split_kernel[(b * heads, n)](
        q.contiguous(), k_codes.view(torch.int32), k_scales, v_codes.view(torch.int32), v_scales, table, lengths,
        part, lse, scale * log2e * PAIR_FACTOR / k_global, table.stride(0), n, tokens,
        HEADS=heads, GROUP=hq // heads, D=d, PAGE=page, TILE=tile, ASSEMBLY=not INTERPRET,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _merge_kernel[(b * hq,)](
        part, lse, lengths, out, PAIR_FACTOR / v_global, n, tokens, ROWS_PER_SEQUENCE=hq, D=d, num_warps=1
    )
    return out


def launch_bf16(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, page: int, scale: float, longest: int,
    tile: int = 64, warps: int = 4, stages: int = 3, splits: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """The bf16 kernel of the same family over pools [slots, Hkv, D]."""
    b, hq, d = q.shape
    heads = k.shape[1]
    n, tokens = splits or choose_splits(b, heads, longest, _processors(q), tile)
    part = torch.empty(b * hq * n, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(b * hq * n, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    _bf16_split_kernel[(b * heads, n)](
        q.contiguous(), k, v, table, lengths, part, lse, scale * 1.4426950408889634, table.stride(0), n, tokens,
        HEADS=heads, GROUP=hq // heads, D=d, PAGE=page, TILE=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _merge_kernel[(b * hq,)](part, lse, lengths, out, 1.0, n, tokens, ROWS_PER_SEQUENCE=hq, D=d, num_warps=1)
    return out


def _processors(x: Tensor) -> int:
    if INTERPRET or x.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def fp4_decode_attention(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    softmax_scale: float,
    k_global_scale: float,
    v_global_scale: float,
    max_length: int,
) -> Tensor:
    """Attention of one query a sequence over an nvfp4-exact pool: [B, Hq, D], in q's dtype.

    q [B, Hq, D] (fp16 or bf16; values must fit fp16), Hq a multiple of Hkv; codes u8 [slots, Hkv, D/2] and scales u8
    [slots, Hkv, D/16] as `quantize_pack` writes them; page_table int32 [B, pages] of page numbers, a page being
    `page_size` consecutive slots; lengths int32 [B], at most `max_length` (which fixes the launch: pass the same
    value inside a CUDA graph). A sequence of length 0 gives zeros. D must be a multiple of 128.
    """
    b, hq, d = q.shape
    slots, heads, _ = k_codes.shape
    p = profile_info("nvfp4-exact")
    if d % 128 or hq % heads:
        raise ConfigError(f"decode attention takes heads of 128 n channels in whole groups, not {hq}/{heads} x {d}")
    for name, t, width in (
        ("k_codes", k_codes, d // 2),
        ("v_codes", v_codes, d // 2),
        ("k_scales", k_scales, d // p.block),
        ("v_scales", v_scales, d // p.block),
    ):
        if t.shape != (slots, heads, width) or not t.is_contiguous():
            raise ConfigError(f"{name} must be contiguous {(slots, heads, width)}, not {tuple(t.shape)}")
    return _fp4_decode_attention(
        q, k_codes, k_scales, v_codes, v_scales, page_table, lengths, page_size, softmax_scale, k_global_scale,
        v_global_scale, max_length,
    )  # fmt: skip
