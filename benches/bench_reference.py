"""The PyTorch reference beside torchao and modelopt on a CPU: the same input, the same profile where there is one.

    python benches/bench_reference.py [--shape 2048 2048] [--threads 1] [--repeats 15]

Prints a Markdown table: median and fastest milliseconds, the contestants in turn so that a busy machine slows all of
them alike. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

import torch

from tracekit.numerics import quantize


def peers():
    """The calls into each library, from tests/golden/generate.py."""
    path = Path(__file__).parent.parent / "tests" / "golden" / "generate.py"
    spec = importlib.util.spec_from_file_location("golden_generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contestants(x: torch.Tensor):
    """(name, format, call) of each."""
    amax = x.float().abs().max()
    g, s2 = torch.div(torch.tensor(2688.0), amax), amax / 2688
    own = ["nvfp4-exact", "nvfp4-torchao", "nvfp4-modelopt", "nvfp4-ct", "nvfp4-4over6"]
    for name in own:
        scale = s2 if name in ("nvfp4-torchao", "nvfp4-modelopt") else g
        yield f"tracekit {name}", "NVFP4", lambda name=name, scale=scale: quantize(x, name, global_scale=scale).packed
    for name in ("mxfp4-rceil", "mxfp4-floor"):
        yield f"tracekit {name}", "MXFP4", lambda name=name: quantize(x, name).packed
    yield "tracekit mxfp8", "MXFP8", lambda: quantize(x, "mxfp8").codes
    library = peers()
    if importlib.util.find_spec("torchao"):
        yield "torchao", "NVFP4", lambda: library.torchao(x, s2)
        yield "torchao RCEIL", "MXFP4", lambda: library.torchao_mx(x, "RCEIL")
        yield "torchao FLOOR", "MXFP4", lambda: library.torchao_mx(x, "FLOOR")
        yield "torchao RCEIL", "MXFP8", lambda: library.torchao_mxfp8(x)
    if importlib.util.find_spec("modelopt"):
        from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        yield "modelopt", "NVFP4", lambda: NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=s2)
        yield "modelopt", "MXFP4", lambda: MXFP4QTensor.quantize(x, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=[2048, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(*args.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    calls = list(contestants(x))
    times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name, kind, _ in calls}
    for i in range(args.repeats + 2):
        for name, kind, call in calls:
            start = time.thread_time() if args.threads == 1 else time.perf_counter()
            call()
            stop = time.thread_time() if args.threads == 1 else time.perf_counter()
            if i >= 2:
                times[name, kind].append(1e3 * (stop - start))
    fastest = {}
    for (name, kind), t in times.items():
        if not name.startswith("tracekit"):
            fastest[kind] = min(fastest.get(kind, float("inf")), statistics.median(t))
    clock = "of the thread's processor time" if args.threads == 1 else "of wall time"
    print(f"{args.shape} bf16, {args.threads} thread(s), milliseconds {clock}, {args.repeats} repeats\n")
    print("| format | quantiser | median | fastest | times the fastest library |\n|---|---|---|---|---|")
    for (name, kind), t in sorted(times.items(), key=lambda item: (item[0][1], statistics.median(item[1]))):
        ratio = f"{statistics.median(t) / fastest[kind]:.2f}" if kind in fastest else ""
        print(f"| {kind} | {name} | {statistics.median(t):.2f} | {min(t):.2f} | {ratio} |")


if __name__ == "__main__":
    main()
