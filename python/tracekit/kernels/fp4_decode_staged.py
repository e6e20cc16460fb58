"""Decode attention over a paged FP4 pool on Hopper's asynchronous tensor cores: four warps share a tile.

A thread unpacks the words it has loaded: two nibbles four places apart become the halves of one register with two
shifts and two masks, so channel `8 w + e` of a head ends up at `8 w + reverse(e)` (three bits reversed); q and the
output use the same order. The tile then passes through shared memory to the places that the product wants.

An E2M1 code shifted to the top of an fp16 is its value times 2^-14, an E4M3 byte likewise times 2^-8 (subnormals
too); value times scale times 2^-8 is exact in fp16 for every code and byte.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl

STAGED_FACTOR = 256.0  # 2^8: what decoded values lack


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
def staged_split_kernel(
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
