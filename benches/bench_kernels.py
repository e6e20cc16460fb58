"""Kernels on a CUDA GPU: bit-equality with the reference, then speed against the copy bandwidth of the same run.

    PYTHONPATH=python python benches/bench_kernels.py [--only quantize,guided,weights,decode,attention,aligned] [--tune]

Prints one table; with $OUT set, writes the same numbers to $OUT/bench_kernels.json. Times are medians of repeated
device-event timings over buffers larger than the L2 cache; "share" is bytes moved / time over the copy bandwidth,
where bytes are each input read once and each output written once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

import tracekit.kernels.fp4_decode_attention  # noqa: F401  (the package exports a function of this name)
from tracekit.kernels import decode_attention, guided_qdq, pack_low_bits, quantize_pack
from tracekit.kernels.guided_qdq import launch_guided_qdq
from tracekit.kernels.quantize_pack import launch_quantize_pack
from tracekit.numerics import dequantize, guided_round, profile_info, quantize, unpack_codes

attention = sys.modules["tracekit.kernels.fp4_decode_attention"]
DEV = "cuda"
ROWS: list[dict] = []
WRONG: list[str] = []


def median_ms(fn, rep: int = 100) -> float:
    """Median time of fn in ms, by device events, the L2 cache flushed between runs."""
    return do_bench(fn, warmup=25, rep=rep, return_mode="median")


def graph_us(fn, calls: int = 64) -> float:
    """Time of one call inside a CUDA graph of `calls` calls, in µs."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return do_bench(graph.replay, warmup=25, rep=100, return_mode="median") * 1e3 / calls


def report(name: str, ms: float, nbytes: int, copy_gbs: float, **more) -> None:
    gbs = nbytes / ms / 1e6
    ROWS.append(dict(name=name, ms=ms, bytes=nbytes, gb_s=gbs, share=gbs / copy_gbs, **more))
    note = " ".join(f"{k}={v}" for k, v in more.items())
    print(f"{name:44s} {ms * 1e3:9.1f} us {gbs:7.0f} GB/s {100 * gbs / copy_gbs:5.1f} %  {note}", flush=True)


def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    wrong = (got.cpu() != want).sum().item()
    if wrong:
        WRONG.append(f"{name}: {wrong} of {want.numel()}")


def samples() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(2048, 512, generator=g)
    wide = normal * torch.exp(3 * torch.randn(2048, 1, generator=g))
    heavy = normal / torch.rand(2048, 512, generator=g).clamp(min=1e-3)
    small = torch.randint(-12, 13, (2048, 512), generator=g).float()
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 512)
    rows = {"normal": normal, "wide": wide, "heavy": heavy, "integers": small}
    out = {k: v.bfloat16() for k, v in rows.items()} | {"every bf16": every, "fp32": wide, "fp16": normal.half()}
    return out


def attempt(name: str, fn, *args) -> None:
    """Run one part; a failure is recorded and the rest goes on."""
    try:
        fn(*args)
    except Exception as error:  # noqa: BLE001
        WRONG.append(f"{name}: {type(error).__name__} {str(error)[:200]}")
        print(f"FAILED {name}: {type(error).__name__} {str(error)[:200]}", flush=True)


def check_equality() -> None:
    for profile in ("nvfp4-exact", "mxfp4-rceil", "kv-mx16"):
        attempt(f"equality {profile}", check_profile, profile)
    print("bit-equality:", "all equal" if not WRONG else f"{len(WRONG)} WRONG, e.g. {WRONG[:6]}", flush=True)


def check_profile(profile: str) -> None:
    for kind, x in samples().items():
        for gname, g in (("448.3", torch.tensor(448.3)), ("token", torch.rand(x.shape[0], 1) * 900 + 1)):
            ref = quantize(x, profile, global_scale=g)
            gd, name = g.to(DEV), f"{profile}/{kind}/{gname}"
            for bits in (1, 2, 3, 4):
                packed, scales, low, values = quantize_pack(
                    x.to(DEV), profile, global_scale=gd, bits=bits, with_values=True
                )
                compare(f"{name} codes", packed, ref.packed)
                compare(f"{name} scales", scales, ref.scales)
                compare(f"{name} low{bits}", low, pack_low_bits(ref.codes, bits))
                compare(f"{name} values", values, ref.dequantize())
                y = (x.float() * (1 + 0.1 * torch.randn(x.shape))).to(x.dtype)
                y[: x.shape[0] // 4] = ref.dequantize()[: x.shape[0] // 4]
                s = ref.scales.clone()
                s[0] = profile_info(profile).missing_scale
                for rounding in ("bracket", "bracket_open"):
                    args = dict(bits=bits, profile=profile, rounding=rounding)
                    want = guided_round(y, ref.codes & ((1 << bits) - 1), s, global_scale=g, **args)
                    got = guided_qdq(y.to(DEV), low, s.to(DEV), global_scale=gd, **args)
                    compare(f"{name} guided{bits} {rounding}", got, want)


def tuned(configs, launch) -> tuple[float, str]:
    best = (float("inf"), "")
    for rows, warps in configs:
        ms = median_ms(lambda r=rows, w=warps: launch(r, w), rep=40)
        if ARGS.tune:
            print(f"      rows={rows} warps={warps}: {ms * 1e3:.1f} us", flush=True)
        best = min(best, (ms, f"rows={rows},warps={warps}"))
    return best


CONFIGS = [(32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 8)]


def bench_quantize(copy: float) -> None:
    x = torch.randn(32768, 4096, device=DEV, dtype=torch.bfloat16)
    g = torch.tensor(512.0, device=DEV)
    for profile in ("nvfp4-exact", "mxfp4-rceil"):
        p = profile_info(profile)
        packed = torch.empty(32768, 2048, dtype=torch.uint8, device=DEV)
        scales = torch.empty(32768, 4096 // p.block, dtype=torch.uint8, device=DEV)
        for bits in (0, 1, 4):
            low = torch.empty(32768, 512 * bits, dtype=torch.uint8, device=DEV) if bits else None
            nbytes = 2 * x.numel() + packed.numel() + scales.numel() + (low.numel() if bits else 0)
            ms, config = tuned(
                CONFIGS,
                lambda r, w, p=p, packed=packed, scales=scales, low=low, bits=bits: launch_quantize_pack(
                    x, p, g, packed, scales, low, None, bits, r, w
                ),
            )
            report(f"quantize+pack {profile} capture b={bits}", ms, nbytes, copy, config=config)


def bench_guided(copy: float) -> None:
    x = torch.randn(32768, 4096, device=DEV, dtype=torch.bfloat16)
    g = torch.tensor(512.0, device=DEV)
    out = torch.empty_like(x)
    for profile, bits in (("nvfp4-exact", 1), ("nvfp4-exact", 2), ("nvfp4-exact", 4), ("mxfp4-rceil", 1)):
        p = profile_info(profile)
        _, scales, low, _ = quantize_pack(x, profile, global_scale=g, bits=bits)
        y = x + 0.02 * torch.randn_like(x)
        nbytes = 4 * x.numel() + scales.numel() + low.numel()
        for floor in (False, True):
            ms, config = tuned(
                CONFIGS,
                lambda r, w, p=p, low=low, y=y, scales=scales, bits=bits, floor=floor: launch_guided_qdq(
                    y, p, g, low, scales, out, bits, False, r, w, floor
                ),
            )
            report(f"guided qdq {profile} b={bits} {'codes' if floor else 'values'}", ms, nbytes, copy, config=config)


def bench_weights(copy: float) -> None:
    w = torch.randn(128, 768, 2048, device=DEV, dtype=torch.bfloat16) * 0.02
    g = torch.rand(128, 1, 1, device=DEV) * 1e4 + 1e4
    p = profile_info("nvfp4-exact")
    packed = torch.empty(128, 768, 1024, dtype=torch.uint8, device=DEV)
    scales = torch.empty(128, 768, 128, dtype=torch.uint8, device=DEV)
    values = torch.empty_like(w)
    nbytes = 4 * w.numel() + packed.numel() + scales.numel()
    ms, config = tuned(CONFIGS, lambda r, wp: launch_quantize_pack(w, p, g, packed, scales, None, values, 0, r, wp))
    report("expert weights 128x[768,2048] qdq+pack", ms, nbytes, copy, config=config)


@triton.jit
def _copy_kernel(src, dst, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i, mask=i < n), mask=i < n)


def bench_decode() -> None:
    """Decode sizes inside a CUDA graph, against copy kernels of the same shape."""
    x = torch.randn(64, 2048, device=DEV, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    g = torch.tensor(512.0, device=DEV)
    p = profile_info("nvfp4-exact")
    packed, scales, low, _ = quantize_pack(x, p, global_scale=g, bits=1)
    n = x.numel()
    base = graph_us(lambda: _copy_kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024))
    times = {"copy (triton)": base, "copy (torch)": graph_us(lambda: y.copy_(x))}
    for rows, warps in ((8, 1), (16, 1), (32, 1), (64, 2)):
        times[f"quantize+pack+capture rows={rows} warps={warps}"] = graph_us(
            lambda r=rows, w=warps: launch_quantize_pack(x, p, g, packed, scales, low, None, 1, r, w)
        )
    for rows, warps, floor in itertools.product((8, 16, 32), (1,), (False, True)):  # 8 blocks: 4 elements a thread
        times[f"guided qdq b=1 {'codes' if floor else 'values'} rows={rows} warps={warps}"] = graph_us(
            lambda r=rows, w=warps, f=floor: launch_guided_qdq(x, p, g, low, scales, y, 1, False, r, w, f)
        )
    for name, us in times.items():
        ROWS.append(dict(name=f"decode [64,2048] {name}", us=us, over_copy=us / base))
        print(f"decode [64,2048] {name:44s} {us:7.2f} us  {us / base:5.2f} x copy", flush=True)


def pools(batch: int, context: int, page: int, heads: int = 4, d: int = 128):
    """FP4 and bf16 pools of `batch` sequences of `context` tokens in shuffled pages, and their page table."""
    pages = batch * context // page
    table = torch.randperm(pages, device=DEV).view(batch, -1).int()
    slots = pages * page
    g = torch.tensor(512.0, device=DEV)
    dense = [torch.empty(slots, heads, d, device=DEV, dtype=torch.bfloat16).normal_() for _ in range(2)]
    packed = [quantize_pack(t, "nvfp4-exact", global_scale=g)[:2] for t in dense]
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEV)
    return dense, packed, table, lengths


def check_attention() -> None:
    page, context = 64, 4096
    dense, packed, table, lengths = pools(4, context, page)
    lengths = torch.tensor([4096, 1, 0, 2777], dtype=torch.int32, device=DEV)
    q = torch.randn(4, 32, 128, device=DEV, dtype=torch.bfloat16)
    (kc, ks), (vc, vs) = packed
    k, v = (
        attention.gather_pages(dequantize(unpack_codes(c, 128), s, "nvfp4-exact", 512.0), table, page, context)
        for c, s in packed
    )
    want = attention.reference_attention(q, k, v, lengths, 128**-0.5)
    for variant in attention.VARIANTS:
        got = attention.launch_fp4(
            q.float(), kc, ks, vc, vs, table, lengths, page, 128**-0.5, 512.0, 512.0, context, variant
        )
        error = ((got - want).norm() / want.norm()).item()
        print(f"fp4 decode attention {variant}: relative error {error:.1e} against float64", flush=True)
        if not error < 2e-3:
            WRONG.append(f"attention {variant}: {error}")
    k, v = (attention.gather_pages(t, table, page, context) for t in dense)
    got = decode_attention.launch_bf16(q.float(), *dense, table, lengths, page, 128**-0.5, context)
    want = attention.reference_attention(q, k, v, lengths, 128**-0.5)
    print(f"bf16 decode attention: relative error {((got - want).norm() / want.norm()).item():.1e}", flush=True)


BF16_CONFIGS = [(64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3)]


def best_attention(context: int, configs, launch) -> tuple[float, str]:
    """Fastest of `configs` and split lengths that fit; `launch(config, splits)`."""
    best = (float("inf"), "")
    for config in configs:
        for per in (512, 1024, 2048, 4096):
            splits = (-(-context // per), per)
            try:
                ms = median_ms(lambda c=config, s=splits: launch(c, s), rep=15)
            except triton.runtime.errors.OutOfResources:
                continue
            name = f"{config},split={per}"
            if ARGS.tune and context == 32768:
                print(f"      {name}: {ms * 1e3:.0f} us", flush=True)
            best = min(best, (ms, name))
    return best


def bench_context(copy: float, context: int, batch: int = 64, page: int = 64) -> None:
    dense, packed, table, lengths = pools(batch, context, page)
    (kc, ks), (vc, vs) = packed
    q = torch.randn(batch, 32, 128, device=DEV, dtype=torch.bfloat16)
    common = (table, lengths, page, 128**-0.5)
    bf16 = best_attention(
        context,
        BF16_CONFIGS,
        lambda c, splits: decode_attention.launch_bf16(q, *dense, *common, context, *c, splits),
    )
    fp4 = best_attention(
        context,
        attention.VARIANTS,
        lambda c, splits: attention.launch_fp4(q, kc, ks, vc, vs, *common, 512.0, 512.0, context, c, splits),
    )
    report(f"decode attention bf16 KV, context {context}", bf16[0], 4 * dense[0].numel(), copy, config=bf16[1])
    nbytes = 2 * (kc.numel() + ks.numel())
    speedup = round(bf16[0] / fp4[0], 2)
    report(f"decode attention fp4 KV, context {context}", fp4[0], nbytes, copy, config=fp4[1], speedup=speedup)


def bench_attention(copy: float) -> None:
    """Batch 64, 4 KV heads x 128, 32 query heads, pages of 64 tokens in random order."""
    check_attention()
    for context in (8192, 32768, 131072):
        bench_context(copy, context)
        torch.cuda.empty_cache()


def bench_aligned() -> None:
    """The aligned forward: codes multiplied by the hardware, against the emulated product and plain bf16."""
    from tracekit.kernels import aligned_grouped, aligned_linear
    from tracekit.kernels.aligned_linear import product

    x = torch.randn(8192, 2048, device=DEV, dtype=torch.bfloat16)
    w = torch.randn(32, 1536, 2048, device=DEV, dtype=torch.bfloat16) * 0.02
    ends = torch.arange(1, 33, device=DEV, dtype=torch.int32) * 256
    plain = median_ms(lambda: x @ w[0].t())
    for profile in ("int8", "fp8-e4m3"):
        q = quantize(w, profile)
        dense = (q.packed[0], q.scales[0])
        emulated = product(q.profile, x, *dense, None, False).double()
        difference = ((aligned_linear(x, *dense, profile).double() - emulated).norm() / emulated.norm()).item()
        one_by_one = torch.cat(
            [aligned_linear(rows, q.packed[i], q.scales[i], profile) for i, rows in enumerate(x.split(256))]
        ).double()
        grouped = aligned_grouped(x, q.packed, q.scales, ends, profile).double()
        apart = ((grouped - one_by_one).norm() / one_by_one.norm()).item()
        if not (difference < 2**-7 and apart < 2**-8):
            WRONG.append(f"aligned {profile}: {difference} from emulated, {apart} between grouped and dense")
        times = dict(
            hardware=median_ms(lambda d=dense, n=profile: aligned_linear(x, *d, n)),
            emulated=median_ms(lambda d=dense, p=q.profile: product(p, x, *d, None, False)),
            grouped=median_ms(lambda q=q, n=profile: aligned_grouped(x, q.packed, q.scales, ends, n)),
        )
        ROWS.append(
            dict(name=f"aligned {profile}", bf16=plain, difference=difference, grouped_difference=apart, **times)
        )
        line = ", ".join(f"{name} {ms * 1e3:.0f} us" for name, ms in times.items())
        print(
            f"aligned {profile} [8192, 2048] x 1536: {line}, bf16 {plain * 1e3:.0f} us; emulated {difference:.1e} off"
        )


def copy_bandwidth() -> float:
    a = torch.randn(1 << 29, device=DEV, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 4 * a.numel() / median_ms(lambda: b.copy_(a)) / 1e6


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    only = set(ARGS.only.split(","))
    if only != {"aligned"}:  # its products have tolerances, checked beside their timing
        check_equality()
    copy = copy_bandwidth()
    print(f"copy bandwidth {copy:.0f} GB/s (read + written)")
    if "quantize" in only:
        attempt("quantize", bench_quantize, copy)
    if "guided" in only:
        attempt("guided", bench_guided, copy)
    if "weights" in only:
        attempt("weights", bench_weights, copy)
    if "decode" in only:
        attempt("decode", bench_decode)
    if "attention" in only:
        attempt("attention", bench_attention, copy)
    if "aligned" in only:
        attempt("aligned", bench_aligned)
    if os.environ.get("OUT"):
        result = dict(
            device=torch.cuda.get_device_name(),
            torch=torch.__version__,
            triton=triton.__version__,
            copy_gb_s=copy,
            wrong=WRONG,
            rows=ROWS,
        )
        Path(os.environ["OUT"], "bench_kernels.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="quantize,guided,weights,decode,attention,aligned")
    parser.add_argument("--tune", action="store_true")
    ARGS = parser.parse_args()
    main()
