"""One real engine for all tests: a tiny mixture of experts, with small chunks and a small cache."""

import asyncio
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracekit import config as tk
from tracekit.guidance import verify

sys.path.insert(0, str(Path(__file__).parent))

from engine_sizes import CACHE, CHUNK, CONTEXT, EOS, LAYERS, VOCABULARY  # noqa: E402

missing = importlib.util.find_spec("sglang") is None
why = "SGLang is not installed: pip install --no-deps -r tests/sglang/requirements.txt"


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
    config = tk.load([tk.quickstart()], sizes | (values or {}))
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
        | (arguments or {}),
    )
    engine.load(learner.publish())
    try:
        yield SimpleNamespace(engine=engine, settings=settings, learner=learner, scales=scales, folder=out / "guidance")
    finally:
        engine.shutdown()
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
    """`recomputed(result)`: assert that every record equals one made of the engine's own activations."""
    from tracekit import numerics

    def check(result):
        for name in result.names:
            kept = dict(np.load(served.folder / "activations" / result.step / f"{name}.npz"))
            count = len(kept["tokens"]) - 1
            records = result.data.read_batch([name], 0, [count], token_ids=[kept["tokens"]])
            assert len(records) == 3 * LAYERS
            for site, record in records.items():
                spec = result.data.site(site)
                x = torch.from_numpy(kept[f"{site}|x"]).bfloat16()
                g = served.scales[site]
                _, codes, scales = numerics.quantize_dequantize(x, spec.profile, global_scale=g)
                low = numerics.low_bits(codes, spec.bits).numpy()
                np.testing.assert_array_equal(record.codes, low.reshape(record.codes.shape), err_msg=f"{name} {site}")
                np.testing.assert_array_equal(record.scales, scales.numpy().reshape(record.scales.shape))
                assert record.scales.any(-1).all(), f"{name} {site}: a token without rows"

    return check
