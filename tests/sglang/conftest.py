"""One real engine for all tests: a tiny mixture of experts, with small chunks and a small cache."""

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracekit import config as tk
from tracekit.guidance import verify

sys.path.insert(0, str(Path(__file__).parent))

import cache_probe  # noqa: E402
from engine_sizes import CACHE, CHUNK, CONTEXT, EOS, LAYERS, VOCABULARY  # noqa: E402

missing = importlib.util.find_spec("sglang") is None
why = "SGLang is not installed: pip install --no-deps -r tests/sglang/requirements.txt"


ON_GPU = torch.cuda.is_available()
GPU_SIZES = {"model.head_dim": 128}  # SGLang's kernels on CUDA have no heads of 32
GPU_ARGUMENTS = {
    "moe_runner_backend": "triton",
    "cuda_graph_max_bs_decode": 4,
    "cuda_graph_backend_prefill": "disabled",  # it takes more than a minute of the start
    "mem_fraction_static": 0.3,
    "disable_custom_all_reduce": True,
}
MORE = "TRACEKIT_TEST_ENGINE"
"""Environment variable: further arguments of the tests' engines, JSON."""


def pytest_collection_modifyitems(items):
    if missing:
        for item in items:
            if "tests/sglang" in str(item.fspath):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The engine, the model behind it, and what helps to ask it."""
    with serve(tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@contextlib.contextmanager
def serve(out, values=None, arguments=None, **more):
    """An engine in `out`, as `served` has it; `values` for the configuration, `arguments` for the engine, `more` for
    the plugin's settings."""
    from tracekit.learner.hf import published_tensors, save_hf
    from tracekit.learner.learner import Learner
    from tracekit.rollout.record import make_schema
    from tracekit.rollout.sglang.engine import SGLangEngine
    from tracekit.rollout.sglang.settings import Settings

    sizes = {"rollout.engine": "sglang", "model.n_layers": LAYERS, "model.max_seq_len": CONTEXT}
    config = tk.load([tk.quickstart()], sizes | (GPU_SIZES if ON_GPU else {}) | (values or {}))
    cache_probe.install(out / "site")
    sys.path.insert(0, str(out / "site"))
    os.environ[cache_probe.FOLDER] = str(out / "cache")
    learner = Learner(config, VOCABULARY, device=torch.device("cpu"))
    kinds = ("moe_input", "moe_hidden", "k", "v")
    scales = {f"layers.{i}.{kind}": torch.tensor(64.0) for i in range(LAYERS) for kind in kinds}
    save_hf(out / "model", learner.model, config.model, VOCABULARY, learner.publish(), eos_id=EOS, pad_id=0)
    settings = Settings(
        folder=str(out / "guidance"),
        experts=config.quant.experts,
        kv=config.quant.kv,
        static_scales={site: float(g) for site, g in scales.items()},
        sites=make_schema(config, scales).sites,
        keep_activations=True,
        **more,
    )
    engine = SGLangEngine(
        out / "model",
        settings,
        tensors=lambda weights: published_tensors(learner.model, weights),
        layers=LAYERS,
        top_k=config.model.top_k,
        eos_id=EOS,
        context=CONTEXT,
        seed=0,
        arguments={"chunked_prefill_size": CHUNK, "max_total_tokens": CACHE, "max_running_requests": 4}
        | (GPU_ARGUMENTS if ON_GPU else {})
        | json.loads(os.environ.get(MORE, "{}"))
        | (arguments or {}),
    )
    engine.load(learner.publish())
    try:
        yield SimpleNamespace(
            engine=engine,
            settings=settings,
            learner=learner,
            scales=scales,
            folder=out / "guidance",
            cache=out / "cache",
            top_k=config.model.top_k,
        )
    finally:
        engine.shutdown()
        sys.path.remove(str(out / "site"))
    for step in sorted((out / "guidance").glob("*")):
        reports = verify(step) if list(step.glob("*.tkg*")) else []
        assert all(report["sealed"] for report in reports), f"{step}: the engine ended without sealing it"


@pytest.fixture
def ask(served, request):
    """`ask(prompts, new)`: greedy responses of exactly `new` tokens, recorded under the test's own step."""
    count = [0]

    def run(prompts, new, *, flow=None, flush=False):
        """`flow(manager)`: a coroutine that runs beside the requests. Returns outputs and the records' dataset."""
        from tracekit.guidance import open_dataset

        step = f"{request.node.name.replace('/', '_')}-{count[0]}"
        count[0] += 1
        names = [f"r{i}" for i in range(len(prompts))]
        engine = served.engine._engine
        if flush:
            engine.flush_cache()

        async def one(name, prompt):
            return await engine.async_generate(
                input_ids=prompt,
                sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
                rid=f"{step}/{name}",
                return_logprob=True,
                return_routed_experts=True,
            )

        async def all_of_them():
            tasks = [asyncio.create_task(one(n, p)) for n, p in zip(names, prompts, strict=True)]
            if flow is not None:
                await flow(engine.tokenizer_manager)
            return await asyncio.gather(*tasks)

        outs = engine.loop.run_until_complete(all_of_them())
        served.engine._wait_for(step, names)
        return SimpleNamespace(outs=outs, names=names, step=step, data=open_dataset(served.folder / step))

    return run


@pytest.fixture
def recomputed(served):
    """`recomputed(result)`: assert that every record equals one made of the engine's own activations, that the experts
    which the engine says it chose are those of the same activations, and (`cache`) that K and V in the cache are the
    rounded ones."""
    from tracekit import numerics
    from tracekit.learner.hf import published_tensors

    def check(result, *, cache=True):
        tensors = dict(published_tensors(served.learner.model, served.learner.publish()))
        gates = [tensors[f"model.layers.{i}.mlp.gate.weight"].float() for i in range(LAYERS)]
        for name, out in zip(result.names, result.outs, strict=True):
            kept = dict(np.load(served.folder / "activations" / result.step / f"{name}.npz"))
            pool = np.load(served.cache / result.step / f"{name}.npz")
            count = len(kept["tokens"]) - 1
            records = result.data.read_batch([name], 0, [count], token_ids=[kept["tokens"]])
            assert len(records) == 3 * LAYERS and {s for s in records if s[-2:] in (".k", ".v")} == set(pool)
            for site, record in records.items():
                spec = result.data.site(site)
                x = torch.from_numpy(kept[f"{site}|x"]).bfloat16()
                g = served.scales[site]
                values, codes, scales = numerics.quantize_dequantize(x, spec.profile, global_scale=g)
                low = numerics.low_bits(codes, spec.bits).numpy()
                np.testing.assert_array_equal(record.codes, low.reshape(record.codes.shape), err_msg=f"{name} {site}")
                np.testing.assert_array_equal(record.scales, scales.numpy().reshape(record.scales.shape))
                assert record.scales.any(-1).all(), f"{name} {site}: a token without rows"
                if cache and site in pool:
                    np.testing.assert_array_equal(pool[site], values.float().numpy().reshape(pool[site].shape))
            check_routes(out["meta_info"]["routed_experts"], gates, kept, served.top_k)

    return check


def check_routes(said, gates, kept, top_k):
    """`said` (base64 int32 [tokens, layers, top_k]) are the experts of the largest logits of the kept inputs; the
    engine's logits are BF16, so two may change places that are this close."""
    chosen = torch.from_numpy(np.frombuffer(base64.b64decode(said), np.int32).reshape(-1, len(gates), top_k).copy())
    sure = 0
    for layer, gate in enumerate(gates):
        x = torch.from_numpy(kept[f"layers.{layer}.moe_input|x"]).float()
        logits = x.reshape(len(x), -1) @ gate.T
        assert len(chosen) == len(logits)
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen[:, layer].long(), True)
        assert (inside.sum(1) == top_k).all(), f"layer {layer}: an expert twice"
        close = logits.abs().amax(1) * 2**-6
        gap = logits.masked_fill(~inside, torch.inf).amin(1) - logits.masked_fill(inside, -torch.inf).amax(1)
        assert (gap > -close).all(), f"layer {layer}: experts of other tokens at {(gap <= -close).nonzero().flatten()}"
        sure += (gap > close).sum().item()
    assert sure > 0.7 * len(gates) * len(chosen), "too many near ties to tell"
