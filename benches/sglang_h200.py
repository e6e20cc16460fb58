"""Throughput of SGLang on one GPU, with and without capture, in engines that stand side by side and take turns.

A round is one batch of each, in an order that turns over every round, so that the clock and the neighbours are the same
for all; a ratio is one round's, its median is printed. Beside it: the share of the scheduler's time that the plugin
took, the scheduler's resident memory after each round, and what `verify` says of the records.

| mode | rounded | recorded |
|---|---|---|
| `plain` | nothing | nothing |
| `experts` | experts' activations | nothing |
| `qdq` | experts' activations, K and V | nothing |
| `half` | 〃 | one bit a code, and scales, of the last half of the layers |
| `all`, `all4` | 〃 | one bit, four bits of every layer |
| `all-experts`, `all-kv` | 〃 | one bit of every layer: activations alone, K and V alone |

    python benches/sglang_h200.py --out results.json [--rounds 5] [--batch 128] [--new 512] [--modes qdq half all]
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch

HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 16, 32, 4, 512, 16, 4, 128, 32768
PROFILE, SCALE = "nvfp4-exact", 64.0


def write_model(folder: Path, positions: int = 40960) -> None:
    """A random Qwen3-MoE of about 0.9 B parameters, BF16."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": positions,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size).bfloat16()

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=1.0),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
            ("mlp.gate", EXPERTS, HIDDEN),
        ):
            tensors[f"{layer}.{name}.weight"] = normal(rows, columns)
        for name, size in (
            ("self_attn.q_norm", HEAD),
            ("self_attn.k_norm", HEAD),
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
        ):
            tensors[f"{layer}.{name}.weight"] = ones(size)
        for e in range(EXPERTS):
            for name, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                tensors[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] = normal(*shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


MODES = {  # rounds experts, rounds K and V, share of the layers recorded, bits, which sites
    "plain": (False, False, 0.0, 0, ""),
    "experts": (True, False, 0.0, 0, ""),
    "qdq": (True, True, 0.0, 0, ""),
    "half": (True, True, 0.5, 1, "mkv"),
    "all": (True, True, 1.0, 1, "mkv"),
    "all4": (True, True, 1.0, 4, "mkv"),
    "all-experts": (True, True, 1.0, 1, "m"),
    "all-kv": (True, True, 1.0, 1, "kv"),
}


def make_settings(mode: str, folder: Path):
    """What an engine of `mode` rounds and records."""
    from tracekit.guidance import SiteSpec
    from tracekit.rollout.sglang.settings import Settings

    experts, kv, share, bits, which = MODES[mode]
    kinds = ("moe_input", "moe_hidden") * experts + ("k", "v") * kv
    sizes = (("moe_input", 1, HIDDEN), ("k", KV_HEADS, HEAD), ("v", KV_HEADS, HEAD))
    return Settings(
        folder=str(folder),
        experts=PROFILE if experts else None,
        kv=PROFILE if kv else None,
        static_scales={f"layers.{i}.{kind}": SCALE for i in range(LAYERS) for kind in kinds},
        sites=[
            SiteSpec(
                name=f"layers.{i}.{kind}",
                planes=planes,
                width=width,
                profile=PROFILE,
                block=16,
                bits=bits,
                global_scale=SCALE,
            )
            for i in range(LAYERS - int(share * LAYERS), LAYERS)
            for kind, planes, width in sizes
            if kind[0] in which
        ],
    )


def start(mode: str, work: Path, batch: int, context: int, tokens: int):
    """An engine of `mode` with room for `tokens` tokens in its cache."""
    from tracekit.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(
        work / "model",
        make_settings(mode, work / mode),
        tensors=lambda _: {},  # nothing is published here
        layers=LAYERS,
        top_k=TOP_K,
        eos_id=2,
        context=context,
        seed=0,
        arguments={
            "max_running_requests": batch,
            "cuda_graph_max_bs_decode": batch,
            "cuda_graph_backend_prefill": "disabled",  # it would take more than a minute of the start
            "max_total_tokens": tokens,
            "moe_runner_backend": "triton",
            "disable_radix_cache": True,
            "mem_fraction_static": 0.5,
            "disable_custom_all_reduce": True,
        },
    )


def children(pid: int) -> list:
    """The processes below `pid`."""
    import psutil

    return psutil.Process(pid).children(recursive=True)


def memory(pid: int) -> dict[str, float]:
    """Resident MB of the processes below `pid`, by name."""
    import psutil

    out: dict[str, float] = {}
    for process in children(pid):
        try:
            name = "scheduler" if "scheduler" in " ".join(process.cmdline()) else process.name()
            out[name] = max(out.get(name, 0.0), process.memory_info().rss / 1e6)
        except psutil.Error:
            continue
    return out


def run(engine, prompts: list[list[int]], new: int, step: str, top: int) -> dict:
    """One batch: tokens a second, when it ran, memory; the records are on disk before this returns, and not in the
    time."""
    names = [f"r{i}" for i in range(len(prompts))]
    begin = time.perf_counter()
    engine._engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True},
        rid=[f"{step}/{name}" for name in names],
        return_logprob=True,
        top_logprobs_num=top,
        return_routed_experts=True,
    )
    end = time.perf_counter()
    if engine.settings.sites:
        engine._wait_for(step, names)
    written = time.perf_counter()
    return {
        "tokens_per_s": len(prompts) * new / (end - begin),
        "from": begin,
        "to": end,
        "records_after_s": written - end,
        "memory_mb": memory(os.getpid()),
    }


def serve(mode: str, work: Path, options: argparse.Namespace, pipe) -> None:
    """A process with one engine: answers (prompts, new, step, top) with what `run` returns, until None."""
    from tracekit.rollout.sglang import stopwatch

    os.environ[stopwatch.VARIABLE] = str(work / f"{mode}.times")
    size = options.prompt + options.new + 8
    answer_jobs(pipe, lambda: start(mode, work, options.batch, size, options.batch * size), run)


def answer_jobs(pipe, start, run) -> None:
    """The other end of `Engines`: says how long the engine of `start()` took, then `run(engine, *job)` of each job
    until None; what goes wrong as text."""
    try:
        engine = start()
        pipe.send(engine.start_seconds)
        while (job := pipe.recv()) is not None:
            pipe.send(run(engine, *job))
        engine.shutdown()
    except BaseException:
        pipe.send(traceback.format_exc())


class Engines:
    """One process an engine, `serve(mode, work, options, pipe)`; all start at once, within `limit` seconds each."""

    def __init__(self, serve, modes: list[str], work: Path, options: argparse.Namespace, limit: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = {}, {}
        for mode in modes:
            self.pipes[mode], theirs = context.Pipe()
            self.processes[mode] = context.Process(target=serve, args=(mode, work, options, theirs))
            self.processes[mode].start()
        try:
            self.start_seconds = {mode: self.answer(mode, limit) for mode in modes}
        except BaseException:
            self.close()
            raise

    def ask(self, mode: str, job: tuple, limit: float) -> dict:
        """What `mode` makes of `job` within `limit` seconds."""
        self.pipes[mode].send(job)
        return self.answer(mode, limit)

    def answer(self, mode: str, limit: float):
        """What `mode` says within `limit` seconds; after that, the stacks of its processes (where a handler of SIGUSR1
        prints them) and TimeoutError."""
        if not self.pipes[mode].poll(limit):
            for process in children(self.processes[mode].pid):
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(3)
            raise TimeoutError(f"{mode} did not answer within {limit:.0f} s")
        said = self.pipes[mode].recv()
        if isinstance(said, str):
            raise RuntimeError(said)
        return said

    def close(self) -> None:
        """End every process, with its children."""
        for mode, process in self.processes.items():
            below = children(process.pid) if process.is_alive() else []
            try:
                self.pipes[mode].send(None)
            except OSError:
                pass
            process.join(15)
            for one in below:
                if one.is_running():
                    one.kill()
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--top", type=int, default=0, help="log-probs of this many likeliest tokens a position")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a batch may take")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["qdq", "half", "all"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: throughput on a CPU says nothing about the copy stream or CUDA graphs")
    from tracekit.guidance import verify
    from tracekit.rollout.sglang.stopwatch import busy_share

    result: dict = {"gpu": torch.cuda.get_device_name(), "options": vars(options) | {"out": str(options.out)}}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model")
        prompts = np.random.default_rng(0).integers(3, VOCABULARY, (options.batch, options.prompt)).tolist()
        engines = Engines(serve, options.modes, work, options, 240)
        print("started", {k: round(v) for k, v in engines.start_seconds.items()}, flush=True)
        rounds: list[dict[str, dict]] = []
        try:
            for mode in options.modes:
                engines.ask(mode, (prompts[:2], 8, "first", options.top), options.limit)
                warm = engines.ask(mode, (prompts, options.new, "warm", options.top), options.limit)
                print("warm", mode, round(warm["tokens_per_s"]), f"{warm['records_after_s']:.1f} s", flush=True)
            for r in range(options.rounds):
                order = options.modes if r % 2 == 0 else options.modes[::-1]
                rounds.append(
                    {m: engines.ask(m, (prompts, options.new, f"round{r}", options.top), options.limit) for m in order}
                )
                print(json.dumps({m: round(rounds[-1][m]["tokens_per_s"]) for m in options.modes}), flush=True)
        except (TimeoutError, RuntimeError) as error:
            print(error, file=sys.stderr, flush=True)
            result["failed"] = str(error)
        finally:
            engines.close()
        base = options.modes[0]
        table = {}
        for mode in options.modes if rounds else ():
            times, row = work / f"{mode}.times", {}
            row["tokens_per_s"] = statistics.median(r[mode]["tokens_per_s"] for r in rounds)
            row[f"ratio to {base}"] = statistics.median(
                r[mode]["tokens_per_s"] / r[base]["tokens_per_s"] for r in rounds if mode in r and base in r
            )
            row["scheduler MB, first and last round"] = [
                round(r[mode]["memory_mb"].get("scheduler", max(r[mode]["memory_mb"].values(), default=0)))
                for r in (rounds[0], rounds[-1])
            ]
            row["records after, s"] = statistics.median(r[mode]["records_after_s"] for r in rounds)
            if times.exists():
                shares = [busy_share(times, r[mode]["from"], r[mode]["to"]) for r in rounds]
                row["plugin's share of the scheduler"] = statistics.median(shares)
            if (work / mode).exists():
                reports = [report for folder in (work / mode).iterdir() for report in verify(folder)]
                row["damage"] = sum(len(report["damage"]) for report in reports)
                files = sum(f.stat().st_size for f in (work / mode / "round0").rglob("*") if f.is_file())
                row["bytes a token"] = files / (options.batch * (options.prompt + options.new - 1))
            table[mode] = row
        result |= {"start_seconds": engines.start_seconds, "rounds": rounds, "table": table}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        for mode, row in table.items():
            print(mode, json.dumps(row))


if __name__ == "__main__":
    main()
