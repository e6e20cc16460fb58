"""Real servers of two tensor-parallel ranks: each records its heads, the first one the experts' inputs."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serving import end, free_port, start_server, wait_for

from tracekit import config as tk
from tracekit import numerics
from tracekit.guidance import open_dataset, verify

pytestmark = pytest.mark.long

LAYERS, RANKS, VOCABULARY, EOS = 2, 2, 64, 1


@pytest.fixture(scope="module", params=["bf16", "packed"])
def served(tmp_path_factory, request):
    """A server with each cache; a rank's one head fills the packed one's words from 64 values on."""
    cores = sorted(os.sched_getaffinity(0))
    # Without it SGLang wants a NUMA node for each rank.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(RANKS))
    from tracekit.learner.hf import save_hf
    from tracekit.learner.learner import Learner
    from tracekit.rollout.record import make_schema
    from tracekit.rollout.sglang.servers import SGLangServers
    from tracekit.rollout.sglang.settings import FILE, Settings

    out = tmp_path_factory.mktemp("parallel")
    sizes = {"rollout.engine": "sglang", "model.n_layers": LAYERS, "rollout.kv_pool": request.param}
    config = tk.load([tk.quickstart()], sizes | ({"model.head_dim": 64} if request.param == "packed" else {}))
    learner = Learner(config, VOCABULARY, device=torch.device("cpu"))
    kinds = ("moe_input", "moe_hidden", "k", "v")
    scales = {f"layers.{i}.{kind}": torch.tensor(64.0) for i in range(LAYERS) for kind in kinds}

    def save(folder, weights):
        save_hf(folder, learner.model, config.model, VOCABULARY, weights, eos_id=EOS, pad_id=0)

    save(out / "engine_model", learner.publish())
    settings = Settings(
        folder=str(out / "guidance"),
        experts=config.quant.experts,
        kv=config.quant.kv,
        kv_pool=config.rollout.kv_pool,
        static_scales={site: float(g) for site, g in scales.items()},
        sites=make_schema(config, scales).sites,
        keep_activations=True,
    )
    settings.save(out / "engine_model" / FILE)
    port = free_port()
    with open(out / "server.log", "wb") as log:
        process = start_server(out / "engine_model", port, log, "--tp-size", str(RANKS))
        try:
            wait_for(process, port, 500)
            engine = SGLangServers(
                [f"http://127.0.0.1:{port}"],
                settings,
                save_weights=save,
                weights_folder=out / "published",
                layers=LAYERS,
                top_k=config.model.top_k,
                eos_id=EOS,
                timeout=300,
            )
            yield SimpleNamespace(
                out=out, config=config, learner=learner, engine=engine, settings=settings, process=process
            )
        finally:
            del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]
            end(process)
            print((out / "server.log").read_text()[-3000:])


def test_the_ranks_parts_make_whole_records(served):
    from tracekit.rollout.sglang.handshake import shake_hands

    served.learner.version = 2
    served.engine.load(served.learner.publish())
    shake_hands(served.engine, VOCABULARY)
    names = [f"r{i}" for i in range(6)]
    prompts = [[5, 6, 7, 8, 9 + i] for i in range(3)]
    rollouts = served.engine.generate(
        prompts, group_size=2, temperature=1.0, max_response_len=12, topk=4, step="first", names=names
    )
    folder = served.out / "guidance" / "first"
    data = open_dataset(folder)
    assert len(list(folder.glob("*.tkg*"))) == RANKS and sorted(data.ids()) == names
    heads = {site.name: site.planes for site in served.settings.sites}
    for row, name in enumerate(names):
        tokens = rollouts.tokens[row, : rollouts.prompt_len[row] + rollouts.response_len[row]]
        records = data.read_batch([name], 0, [len(tokens) - 1], token_ids=[tokens])
        assert set(records) == set(heads)
        kept = [np.load(served.out / f"guidance/activations/first/{name}.part{r}.npz") for r in range(RANKS)]
        for site, record in records.items():
            parts = [part[f"{site}|x"] for part in kept if f"{site}|x" in part]
            assert len(parts) == (1 if site.endswith("moe_input") else RANKS)
            x = torch.from_numpy(np.concatenate(parts, 1)).bfloat16()
            assert x.shape[1] == heads[site] and record.scales.any(-1).all()
            profile = served.config.quant.experts if site.endswith("moe_input") else served.config.quant.kv
            _, codes, scales = numerics.quantize_dequantize(x, profile, global_scale=torch.tensor(64.0))
            low = numerics.low_bits(codes, served.config.guidance.bits).numpy()
            np.testing.assert_array_equal(record.codes, low.reshape(record.codes.shape), err_msg=f"{name} {site}")
            np.testing.assert_array_equal(record.scales, scales.numpy().reshape(record.scales.shape))
        assert set(data[name].policy_version) == {2}


def test_the_experts_inputs_are_those_of_a_whole_engine(served):
    """The first rank's rows are whole activations, not its share of a sum: the in-process engine has nearly the same
    for the same tokens."""
    from tracekit.rollout.cache import Capture
    from tracekit.rollout.engine import InProcessEngine

    scales = {site: torch.tensor(g) for site, g in served.settings.static_scales.items()}
    alone = InProcessEngine(served.config.model, served.config.quant, eos_id=EOS, pad_id=0, static_scales=scales)
    alone.load(served.learner.publish())
    prompt = [5 + 7 * i % 50 for i in range(24)]
    served.engine.generate([prompt], group_size=1, temperature=0.0, max_response_len=1, step="same", names=["r0"])
    alone.capture = Capture(sites=[site.name for site in served.settings.sites])
    alone.generate([prompt], group_size=1, temperature=0.0, max_response_len=1, seed=0)
    records = open_dataset(served.out / "guidance" / "same").read_batch(["r0"], 0, [len(prompt)])
    for site, record in records.items():
        codes, scale_bits, _ = alone.capture.captured[site].prompt
        low = numerics.low_bits(codes, served.config.guidance.bits).numpy().reshape(record.codes.shape)
        assert (record.codes == low).mean() > 0.85, site
        assert (record.scales == scale_bits.numpy().reshape(record.scales.shape)).mean() > 0.85, site


def test_both_ranks_seal_what_they_wrote(served):
    served.process.terminate()
    served.process.wait(90)
    for step in ("first", "same"):
        reports = verify(served.out / "guidance" / step)
        assert len(reports) == RANKS and all(r["sealed"] and not r["damage"] for r in reports)
