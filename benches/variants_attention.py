"""Variants of FP4 decode attention on one CUDA GPU, beside bf16 KV and the copy bandwidth of the same run.

    PYTHONPATH=python python benches/variants_attention.py [--contexts 8192,32768,131072] [--batch 64]

First every variant against float64 (ragged lengths, an empty sequence, shuffled pages of 64 and of 1), then medians
of device-event timings with the L2 cache flushed between runs. Prints a table last; with $OUT set, writes the same
numbers, every split length with them, to $OUT/variants_attention.json. `launch_fp4` runs `VARIANT` of
tracekit/kernels/fp4_decode_attention.py: set that to the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

import tracekit.kernels.fp4_decode_attention  # noqa: F401  (the package exports a function of this name)
from tracekit.kernels import decode_attention, quantize_pack
from tracekit.numerics import dequantize, unpack_codes

attention = sys.modules["tracekit.kernels.fp4_decode_attention"]
DEV, HEADS, GROUP, D, PAGE, G = "cuda", 4, 8, 128, 64, 512.0
SPLITS = (512, 1024, 2048, 4096)
BF16 = {"tile 64, 4 warps": (64, 4, 3), "tile 128, 4 warps": (128, 4, 2), "tile 128, 8 warps": (128, 8, 3)}


def median_us(fn) -> float:
    return do_bench(fn, warmup=5, rep=20, return_mode="median") * 1e3


def copy_bandwidth() -> float:
    a = torch.randn(1 << 29, device=DEV, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 4 * a.numel() / median_us(lambda: b.copy_(a)) / 1e3


def pools(batch: int, context: int, page: int = PAGE):
    """Dense and packed K and V of `batch` sequences in shuffled pages, and the page table."""
    pages = -(-context // page)
    table = torch.randperm(batch * pages, device=DEV).view(batch, pages).int()
    dense, packed = [], []
    for _ in range(2):
        t = torch.empty(batch * pages * page, HEADS, D, device=DEV, dtype=torch.bfloat16).normal_()
        codes, scales, _, _ = quantize_pack(t, "nvfp4-exact", global_scale=torch.tensor(G, device=DEV))
        dense.append(t)
        packed += [codes, scales]
    return dense, packed, table


def check(page: int) -> dict[str, float]:
    """Relative error of every variant against float64 on the same codes, worse of two softmax scales."""
    context = 1000
    _, packed, table = pools(4, context, page)
    lengths = torch.tensor([1000, 1, 0, 777], dtype=torch.int32, device=DEV)
    q = torch.randn(4, HEADS * GROUP, D, device=DEV)
    kc, ks, vc, vs = packed
    k, v = (
        attention.gather_pages(dequantize(unpack_codes(c, D), s, "nvfp4-exact", G, torch.float64), table, page, context)
        for c, s in ((kc, ks), (vc, vs))
    )
    errors = dict.fromkeys(attention.VARIANTS, 0.0)
    for scale in (D**-0.5, -0.05):
        want = attention.reference_attention(q, k, v, lengths, scale)
        for variant in errors:
            for splits in ((8, 128), (1, 1024)):
                out = attention.launch_fp4(q, *packed, table, lengths, page, scale, G, G, context, variant, splits)
                error = ((out - want).norm() / want.norm()).item()
                errors[variant] = max(errors[variant], error if error == error else float("inf"))
    return errors


def time_all(batch: int, context: int) -> dict[str, dict[str, float]]:
    """µs by variant and split length, bf16 KV among them."""
    dense, packed, table = pools(batch, context)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEV)
    q = torch.randn(batch, HEADS * GROUP, D, device=DEV, dtype=torch.bfloat16)
    common = (table, lengths, PAGE, D**-0.5)
    times: dict[str, dict[str, float]] = {}
    for name, config in BF16.items():
        times[f"bf16 KV, {name}"] = {
            str(per): median_us(
                lambda c=config, p=per: decode_attention.launch_bf16(
                    q, *dense, *common, context, *c, (-(-context // p), p)
                )
            )
            for per in SPLITS[1:]
        }
    for variant in attention.VARIANTS:
        times[variant] = {
            str(per): median_us(
                lambda v=variant, p=per: attention.launch_fp4(
                    q, *packed, *common, G, G, context, v, (-(-context // p), p)
                )
            )
            for per in SPLITS
        }
        times[variant]["chosen"] = median_us(
            lambda v=variant: attention.launch_fp4(q, *packed, *common, G, G, context, v)
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    began = time.monotonic()
    errors = {page: check(page) for page in (PAGE, 1)}
    for page, of in errors.items():
        print(f"page {page}: relative error", {k: f"{e:.1e}" for k, e in of.items()}, flush=True)
    wrong = [f"{variant}, page {page}" for page, of in errors.items() for variant, e in of.items() if not e < 2e-3]
    copy = copy_bandwidth()
    print(f"checked in {time.monotonic() - began:.0f} s", flush=True)
    results, lines = {}, []
    for context in map(int, args.contexts.split(",")):
        results[context] = times = time_all(args.batch, context)
        torch.cuda.empty_cache()
        elements = 2 * args.batch * context * HEADS * D
        best_bf16 = min(min(t.values()) for name, t in times.items() if name.startswith("bf16"))
        for name, by_split in times.items():
            split, us = min(by_split.items(), key=lambda item: item[1])
            nbytes = elements * (2 if name.startswith("bf16") else 0.5625)
            lines.append(
                f"{context:7d} {name:26s} split {split:>6s} {us:9.1f} us {nbytes / us / 1e3 / copy:6.1%} of copy"
                f" {best_bf16 / us:5.2f} x bf16  default split {by_split.get('chosen', us):9.1f} us"
            )
        print(f"context {context}: {time.monotonic() - began:.0f} s", flush=True)
    if os.environ.get("OUT"):
        record = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
                      batch=args.batch, copy_gb_s=copy, errors=errors, wrong=wrong, us=results)  # fmt: skip
        Path(os.environ["OUT"], "variants_attention.json").write_text(json.dumps(record, indent=1))
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"copy {copy:.0f} GB/s (read + written); WRONG: {wrong or 'none'}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
