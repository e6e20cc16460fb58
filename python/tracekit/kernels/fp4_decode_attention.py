"""Decode attention over a paged FP4 pool: one query a sequence, grouped heads, split over the context.

The pool holds codes and scales as the write kernel left them and is never expanded. Softmax and sums are fp32, products
fp16 with fp32 accumulation; decoded values are exact in fp16 up to a power of two that comes off with the softmax
scale and in the merge. `VARIANTS` are kernels and tile shapes with the same results up to rounding; `VARIANT` runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels._triton import INTERPRET, hardware_casts, next_power_of_two, runs_triton
from tracekit.kernels.decode_attention import (
    LOG2_E,
    choose_splits,
    gather_pages,
    launch_merge,
    processors,
    reference_attention,
    split_buffers,
)
from tracekit.kernels.fp4_decode_lanes import lanes_split_kernel
from tracekit.kernels.fp4_decode_staged import STAGED_FACTOR, staged_split_kernel
from tracekit.kernels.fp4_expand import CODE_FACTOR
from tracekit.numerics import dequantize
from tracekit.numerics.formats import unpack_codes
from tracekit.numerics.profiles import profile_info


@dataclass(frozen=True)
class Variant:
    """`decode`: how lanes expand codes (`fp4_expand`); "staged" passes them through shared memory instead.
    `resident` programs fit a processor at once (registers; sm_90)."""

    decode: str
    tile: int
    warps: int
    stages: int
    resident: int


VARIANTS = {
    "e4m3-32": Variant("e4m3", 32, 1, 2, 12),
    "e4m3-32-deep": Variant("e4m3", 32, 1, 3, 12),
    "e4m3-64": Variant("e4m3", 64, 1, 2, 10),
    "shift-32": Variant("shift", 32, 1, 2, 12),
    "shift-64": Variant("shift", 64, 1, 2, 8),
    "staged-64": Variant("staged", 64, 4, 3, 4),
    "staged-128": Variant("staged", 128, 4, 3, 3),
}
VARIANT = "e4m3-32"  # the fastest of them at 128 k on an H200, within 4 % of it at 8 k and 32 k


@torch.library.custom_op("tracekit::fp4_decode_attention", mutates_args=())
def _fp4_decode_attention(
    q: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor, lengths: Tensor,
    page: int, scale: float, k_global: float, v_global: float, longest: int, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if runs_triton(q):
        return launch_fp4(q, k_codes, k_scales, v_codes, v_scales, table, lengths, page, scale, k_global, v_global,
                          longest, rows=rows)  # fmt: skip
    table, page = (table, page) if rows is None else (table[rows.long()], 1)
    table = table[:, : -(-int(lengths.max()) // page)] if len(lengths) else table
    pools = []
    for codes, scales, g in ((k_codes, k_scales, k_global), (v_codes, v_scales, v_global)):
        codes, scales = (gather_pages(t, table, page, longest) for t in (codes, scales))
        pools.append(dequantize(unpack_codes(codes, q.shape[-1]), scales, "nvfp4-exact", g, torch.float64))
    return reference_attention(q, *pools, lengths, scale).to(q.dtype)


@_fp4_decode_attention.register_fake
def _(q, k_codes, k_scales, v_codes, v_scales, table, lengths, page, scale, k_global, v_global, longest, rows=None):
    return torch.empty_like(q)


def decoding(v: Variant, q: Tensor) -> str:
    """How codes are expanded where q is: without E4M3 in hardware by shifts, without assembly by integers."""
    if v.decode == "staged":
        return "staged"
    if INTERPRET:
        return "integer"
    return "e4m3" if v.decode == "e4m3" and hardware_casts(q) else "shift"


def launch_fp4(
    q: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor, lengths: Tensor,
    page: int, scale: float, k_global: float, v_global: float, longest: int, variant: str = VARIANT,
    splits: tuple[int, int] | None = None, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Start the kernels; `splits` is (number, tokens each, whole tiles), chosen by size if absent. With `rows` (see
    `fp4_decode_attention`) each sequence splits its own length, so that a launch fits all lengths."""
    v = VARIANTS[variant]
    b, hq, d = q.shape
    heads = k_codes.shape[1]
    group = hq // heads
    n, tokens = splits or choose_splits(b, heads, longest, v.resident * processors(q), v.tile)
    tokens = tokens if rows is None else 0
    part, lse = split_buffers(q, n)
    decode = decoding(v, q)
    code_factor = STAGED_FACTOR if decode == "staged" else CODE_FACTOR[decode]
    factor = scale * LOG2_E * code_factor / k_global
    if factor < 0:  # a maximum of scores times the factor has to be the factor times their maximum
        q, factor = -q, -factor
    pools = (k_codes.view(torch.int32), k_scales, v_codes.view(torch.int32), v_scales)
    held = (q.contiguous(), *pools, table)
    sizes = (lengths, part, lse, factor, table.stride(0), n, tokens)
    options = dict(HEADS=heads, GROUP=group, D=d, PAGE=page, TILE=v.tile, num_warps=v.warps, num_stages=v.stages)
    if decode == "staged":
        if rows is not None:
            raise ConfigError(f"variant {variant} takes a table of pages, not one of slots (rows)")
        staged_split_kernel[(b * heads, n)](*held, *sizes, ASSEMBLY=not INTERPRET, **options)
    else:
        options |= dict(ROWS=max(8, next_power_of_two(group)), DECODE=decode, SLOTS=rows is not None)
        lanes_split_kernel[(b * heads, n)](*held, lengths if rows is None else rows, *sizes, **options)
    return launch_merge(q, part, lse, lengths, n, tokens, code_factor / v_global, v.tile)


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
    rows: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence over an nvfp4-exact pool: [B, Hq, D], in q's dtype.

    q [B, Hq, D] (fp16 or bf16; values must fit fp16), Hq a multiple of Hkv; codes u8 [slots, Hkv, D/2] and scales u8
    [slots, Hkv, D/16] as `quantize_pack` writes them; page_table int32 [B, pages] of page numbers, a page being
    `page_size` consecutive slots; lengths int32 or int64 [B], at most `max_length` (which fixes the launch: pass the
    same value inside a CUDA graph). A sequence of length 0 gives zeros. D must be a multiple of 128, of 16 on a CPU.

    With `rows`, int [B], `page_table` is int32 [requests, tokens] of slots, one a token, in whole pages, and sequence b
    has row rows[b] of it: an engine's own table, read where it is, by one launch for all lengths.
    """
    b, hq, d = q.shape
    slots, heads, _ = k_codes.shape
    p = profile_info("nvfp4-exact")
    if d % (128 if runs_triton(q) else p.block) or hq % heads:
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
        v_global_scale, max_length, rows,
    )  # fmt: skip
