"""Decode throughput and capacity of SGLang's cache of K and V on one GPU: BF16, BF16 values rounded, packed FP4.

Three engines stand side by side, each with a cache of the same bytes. At each context length: the largest batch that
the cache holds (capacity), its tokens a second, and tokens a second at the batch that BF16 holds. Prompts are random
and all different; they are prefilled once, so that the timed request finds them in the prefix cache and decodes.
Rounded modes round K and V alone and record nothing. `unheld` (on request) is `packed` with a scheduler that may write
to the table of slots while decode reads it: the difference is what holding it costs.

    python benches/sglang_kv_h200.py --out kv.json [--contexts 1024 8192 32768 131072] [--gib 8] [--new 128]
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import sglang_h200 as base  # noqa: E402

MODES = {
    "bf16": (None, "bf16"),
    "rounded": (base.PROFILE, "bf16"),
    "packed": (base.PROFILE, "packed"),
    "unheld": (base.PROFILE, "packed"),
}
USUAL = ("bf16", "rounded", "packed")
PAGE = 64


def token_bytes(mode: str) -> int:
    """Bytes of the cache that a token takes."""
    from tracekit.rollout.sglang.packed_pool import packed_bytes

    bf16 = 2 * 2 * base.LAYERS * base.KV_HEADS * base.HEAD
    return packed_bytes(bf16) if MODES[mode][1] == "packed" else bf16


def cache_tokens(mode: str, options: argparse.Namespace) -> int:
    """Tokens that `--gib` hold, whole pages."""
    return int(options.gib * 2**30) // token_bytes(mode) // PAGE * PAGE


def capacity(mode: str, context: int, options: argparse.Namespace) -> int:
    """Requests of `context` and `--new` tokens that fit the cache, at most `--most`."""
    pages = -(-(context + options.new) // PAGE) + 1
    return min(cache_tokens(mode, options) // (pages * PAGE), options.most)


def start(mode: str, work: Path, options: argparse.Namespace):
    """An engine of `mode` with its cache."""
    from tracekit.rollout.sglang.engine import SGLangEngine
    from tracekit.rollout.sglang.settings import Settings

    kv, pool = MODES[mode]
    kinds = ("k", "v") if kv else ()
    scales = {f"layers.{i}.{kind}": base.SCALE for i in range(base.LAYERS) for kind in kinds}
    most = max(capacity(mode, c, options) for c in options.contexts)
    return SGLangEngine(
        work / "model",
        Settings(folder=str(work / mode), kv=kv, kv_pool=pool, static_scales=scales),
        tensors=lambda _: {},  # nothing is published here
        layers=base.LAYERS,
        top_k=base.TOP_K,
        eos_id=2,
        context=max(options.contexts) + options.new + 8,
        seed=0,
        arguments={
            "page_size": PAGE,
            "max_running_requests": most,
            "cuda_graph_max_bs_decode": most,
            "cuda_graph_backend_prefill": "disabled",
            "chunked_prefill_size": 8192,
            "max_total_tokens": cache_tokens(mode, options),
            "moe_runner_backend": "triton",
            "mem_fraction_static": 0.3,
            "disable_custom_all_reduce": True,
        }
        | options.arguments,
    )


def measure(engine, context: int, batch: int, options: argparse.Namespace) -> dict:
    """Prefill `batch` prompts, then time `--repeats` decodes of `--new` tokens of them."""
    engine._engine.flush_cache()
    prompts = np.random.default_rng(context).integers(3, base.VOCABULARY, (batch, context)).tolist()

    def generate(new: int) -> tuple[float, list[dict]]:
        begin = time.perf_counter()
        outs = engine._engine.generate(
            input_ids=prompts, sampling_params={"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
        )
        return time.perf_counter() - begin, outs

    prefill, _ = generate(1)
    times = []
    for _ in range(options.repeats):
        seconds, outs = generate(options.new)
        times.append(seconds)
    cached = [out["meta_info"]["cached_tokens"] for out in outs]
    return {
        "batch": batch,
        "tokens_per_s": batch * options.new / statistics.median(times),
        "seconds": times,
        "prefill_s": prefill,
        "cached_share": sum(cached) / (batch * context),
    }


def serve(mode: str, work: Path, options: argparse.Namespace, pipe) -> None:
    """A process with one engine: answers (context, batch) with what `measure` returns, until None."""
    from tracekit.rollout.sglang.packed_attention import BARRIER

    if mode == "unheld":
        os.environ[BARRIER] = "0"
    base.answer_jobs(pipe, lambda: start(mode, work, options), functools.partial(measure, options=options))


def jobs(options: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """(context, mode, batch) of each measurement: at the batch that BF16 holds, and at what the mode itself holds."""
    for length in options.contexts:
        shared = capacity("bf16", length, options)
        for mode in options.modes:
            for batch in sorted({shared, capacity(mode, length, options)}):
                yield length, mode, batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(USUAL))
    parser.add_argument("--gib", type=float, default=9.0, help="bytes of each cache: two BF16 contexts of 128 k")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--most", type=int, default=256, help="requests at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one measurement may take")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no measurement starts")
    parser.add_argument("--arguments", type=json.loads, default={}, help="further arguments of sglang.Engine, JSON")
    return parser.parse_args()


def main() -> None:
    options, began = parse(), time.monotonic()
    if not torch.cuda.is_available() and "device" not in options.arguments:
        sys.exit("needs a GPU: throughput on a CPU says nothing about it")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    result: dict = {"gpu": gpu, "options": vars(options) | {"out": str(options.out)}, "table": {}}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        base.write_model(work / "model", positions=max(options.contexts) + options.new + 8)
        try:
            with contextlib.closing(base.Engines(serve, options.modes, work, options, 300)) as engines:
                result["start_seconds"] = engines.start_seconds
                print("started", {k: round(v) for k, v in engines.start_seconds.items()}, flush=True)
                for length, mode, batch in jobs(options):
                    if time.monotonic() - began > options.budget:
                        raise TimeoutError(f"{options.budget:.0f} s are over")
                    row = engines.ask(mode, (length, batch), options.limit)
                    result["table"].setdefault(str(length), {}).setdefault(mode, []).append(row)
                    print(length, mode, batch, round(row["tokens_per_s"]), f"{row['prefill_s']:.1f} s", flush=True)
                    options.out.write_text(json.dumps(result, indent=2) + "\n")
        except (TimeoutError, RuntimeError) as error:
            print(error, file=sys.stderr, flush=True)
            result["failed"] = str(error)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print("context | mode: batch tokens/s (to the first mode at the batch that BF16 holds)")
    for length, modes in result["table"].items():
        first = next(iter(modes.values()))[0]["tokens_per_s"]
        for mode, rows in modes.items():
            said = (f"{r['batch']}: {r['tokens_per_s']:.0f} ({r['tokens_per_s'] / first:.2f})" for r in rows)
            print(length, mode, *said)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
