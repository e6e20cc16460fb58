"""Decode throughput of SGLang on one GPU, with and without capture.

It has no figure yet: on an H200 the engines started, and the first batch did not end in time (docs/sglang.md).

Engines stand side by side in memory and take turns, so that the clock and the neighbours are the same for all: `qdq`
rounds and records nothing, `half` also records one bit a code of the last half of the layers, `all` of every layer. A
round is one batch of each, in an order that turns over every round; a ratio is one round's, its median is printed.

    python benches/sglang_h200.py --out results.json [--rounds 5] [--batch 128] [--new 512] [--modes qdq half all]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 16, 32, 4, 512, 16, 4, 128, 32768
PROFILE, SCALE, PROMPT, TOP = "nvfp4-exact", 64.0, 128, 128


def write_model(folder: Path) -> None:
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
        "max_position_embeddings": 40960,
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


def make_settings(mode: str, folder: Path):
    """What an engine of `mode` rounds and records."""
    from tracekit.guidance import SiteSpec
    from tracekit.rollout.sglang.settings import Settings

    first = {"qdq": LAYERS, "half": LAYERS // 2, "all": 0}[mode]
    sizes = (("moe_input", 1, HIDDEN), ("k", KV_HEADS, HEAD), ("v", KV_HEADS, HEAD))
    rounded = [f"layers.{i}.{kind}" for i in range(LAYERS) for kind in ("moe_input", "moe_hidden", "k", "v")]
    return Settings(
        folder=str(folder),
        experts=PROFILE,
        kv=PROFILE,
        static_scales=dict.fromkeys(rounded, SCALE),
        sites=[
            SiteSpec(
                name=f"layers.{i}.{kind}",
                planes=planes,
                width=width,
                profile=PROFILE,
                block=16,
                bits=1,
                global_scale=SCALE,
            )
            for i in range(first, LAYERS)
            for kind, planes, width in sizes
        ],
    )


def start(mode: str, work: Path, batch: int, new: int, share: float):
    """An engine of `mode` that may take `share` of the GPU's memory."""
    from tracekit.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(
        work / "model",
        make_settings(mode, work / mode),
        tensors=lambda _: {},  # nothing is published here
        layers=LAYERS,
        top_k=TOP_K,
        eos_id=2,
        context=PROMPT + new + 8,
        seed=0,
        arguments={
            "max_running_requests": batch,
            "cuda_graph_max_bs_decode": batch,
            "cuda_graph_backend_prefill": "disabled",  # it would take more than a minute of the start
            "max_total_tokens": batch * (PROMPT + new + 8),
            "moe_runner_backend": "triton",
            "disable_radix_cache": True,
            "mem_fraction_static": share,
        },
    )


def run(engine, prompts: list[list[int]], new: int, step: str) -> float:
    """Tokens a second of one batch; the records are on disk before this returns, and not in the time."""
    names = [f"r{i}" for i in range(len(prompts))]
    begin = time.perf_counter()
    engine._engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True},
        rid=[f"{step}/{name}" for name in names],
        return_logprob=True,
        top_logprobs_num=TOP,
        return_routed_experts=True,
    )
    seconds = time.perf_counter() - begin
    if engine.settings.sites:
        engine._wait_for(step, names)
    return len(prompts) * new / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--modes", nargs="+", choices=("qdq", "half", "all"), default=["qdq", "half", "all"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: throughput on a CPU says nothing about the copy stream or CUDA graphs")
    from tracekit.guidance import verify

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model")
        generator = np.random.default_rng(0)
        prompts = generator.integers(3, VOCABULARY, (options.batch, PROMPT)).tolist()
        share = 0.8 / len(options.modes)
        # SGLang takes its share of what is free when it starts: later ones are asked for more of the rest.
        shares = [share / (1 - i * share) for i in range(len(options.modes))]
        engines = {
            mode: start(mode, work, options.batch, options.new, part)
            for mode, part in zip(options.modes, shares, strict=True)
        }
        try:
            for engine in engines.values():
                run(engine, prompts, options.new, "warm")
            rounds = []
            for r in range(options.rounds):
                order = options.modes if r % 2 == 0 else options.modes[::-1]
                rounds.append({mode: run(engines[mode], prompts, options.new, f"round{r}") for mode in order})
                print(json.dumps(rounds[-1]), flush=True)
        finally:
            for engine in engines.values():
                engine.shutdown()
        damage = {
            mode: sum(len(report["damage"]) for folder in (work / mode).iterdir() for report in verify(folder))
            for mode in options.modes
            if (work / mode).exists()
        }
    base = options.modes[0]
    ratios = {m: statistics.median(r[m] / r[base] for r in rounds) for m in options.modes[1:]}
    result = {
        "gpu": torch.cuda.get_device_name(),
        "batch": options.batch,
        "new_tokens": options.new,
        "rounds": rounds,
        f"median ratio to {base}": ratios,
        "damage": damage,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({f"median ratio to {base}": ratios, "damage": damage}))


if __name__ == "__main__":
    main()
