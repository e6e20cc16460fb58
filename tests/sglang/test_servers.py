"""A real SGLang server, started by `tracekit serve`, and the client that samples from it."""

import importlib.util
import json
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serving import end, family, free_port, start_server, wait_for

from tracekit import config as tk
from tracekit.errors import EngineError
from tracekit.guidance import verify
from tracekit.tasks.tokenizer import PRINTABLE, CharTokenizer

TOKENIZER = CharTokenizer(PRINTABLE[:60])
EOS, LAYERS, VOCABULARY = TOKENIZER.eos_id, 2, TOKENIZER.vocab_size

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed: pip install --no-deps -r tests/sglang/requirements.txt",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from tracekit.learner.hf import save_hf
    from tracekit.learner.learner import Learner
    from tracekit.rollout.record import make_schema
    from tracekit.rollout.sglang.servers import SGLangServers
    from tracekit.rollout.sglang.settings import FILE, Settings
    from tracekit.tasks.tokenizer_hf import save_hf_tokenizer

    out = tmp_path_factory.mktemp("servers")
    config = tk.load([tk.quickstart()], {"rollout.engine": "sglang", "model.n_layers": LAYERS})
    learner = Learner(config, VOCABULARY, device=torch.device("cpu"))
    kinds = ("moe_input", "moe_hidden", "k", "v")
    scales = {f"layers.{i}.{kind}": torch.tensor(64.0) for i in range(LAYERS) for kind in kinds}

    def save(folder, weights):
        save_hf(folder, learner.model, config.model, VOCABULARY, weights, eos_id=EOS, pad_id=0)

    save(out / "engine_model", learner.publish())
    save_hf_tokenizer(out / "engine_model", TOKENIZER, max_len=config.model.max_seq_len)
    settings = Settings(
        folder=str(out / "guidance"),
        experts=config.quant.experts,
        kv=config.quant.kv,
        static_scales={site: float(g) for site, g in scales.items()},
        sites=make_schema(config, scales).sites,
    )
    settings.save(out / "engine_model" / FILE)
    port = free_port()
    connect = partial(
        SGLangServers,
        [f"http://127.0.0.1:{port}"],
        save_weights=save,
        weights_folder=out / "published",
        layers=LAYERS,
        top_k=config.model.top_k,
        eos_id=EOS,
        timeout=180,
    )
    with open(out / "server.log", "wb") as log:
        process = start_server(out / "engine_model", port, log)
        world = SimpleNamespace(
            out=out, learner=learner, settings=settings, connect=connect, process=process, port=port, log=log
        )
        try:
            wait_for(process, port)
            world.engine = connect(settings)
            yield world
        finally:
            end(world.process)
            print((out / "server.log").read_text()[-2000:])


def ask(engine, step, **more):
    prompts = [[5, 6, 7, 8, 9 + i] for i in range(3)]
    names = [f"r{i}" for i in range(6)]
    options = {"group_size": 2, "temperature": 1.0, "max_response_len": 6, **more}
    return engine.generate(prompts, step=step, names=names, **options)


def test_a_server_shakes_hands_and_records_what_it_samples(served):
    from tracekit.guidance import open_dataset
    from tracekit.rollout.sglang.handshake import shake_hands

    served.learner.version = 3
    served.engine.load(served.learner.publish())
    shake_hands(served.engine, VOCABULARY)
    assert not list(served.out.glob("guidance/handshake*"))
    rollouts = ask(served.engine, "first", topk=8)
    data = open_dataset(served.out / "guidance" / "first")
    assert sorted(data.ids()) == rollouts.trajectory
    for row, name in enumerate(rollouts.trajectory):
        tokens = rollouts.tokens[row, : rollouts.prompt_len[row] + rollouts.response_len[row]]
        records = data.read_batch([name], 0, [len(tokens) - 1], token_ids=[tokens])
        assert all(record.scales.any(-1).all() for record in records.values())
        assert set(data[name].policy_version) == {3}
    assert np.isfinite(rollouts.logp_mu[rollouts.sampled]).all() and (rollouts.logp_mu[rollouts.sampled] < 0).all()
    assert rollouts.topk_ids.shape[-1] == 8


def test_it_serves_text_too(served):
    text = "0 1\n+ 2  7b"
    body = {"text": text, "sampling_params": {"temperature": 0.0, "max_new_tokens": 6}, "return_logprob": True}
    body["logprob_start_len"] = 0
    out = served.engine._post(served.engine.urls[0], "generate", body)
    asked = [entry[1] for entry in out["meta_info"]["input_token_logprobs"]]
    assert asked == TOKENIZER.encode_prompt(text)
    letters = [i for i in out["output_ids"] if i >= 4]
    assert out["text"] == "".join(TOKENIZER.alphabet[i - 4] for i in letters)


def snippets():
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_the_docs_sample_and_learn(served, tmp_path, monkeypatch):
    """The rollout worker's example asks the server; the learner's rounds to what the server recorded."""
    from tracekit import numerics

    worker, learner = snippets()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    scope = {}
    exec(worker, scope)
    assert scope["settings"].sites == served.settings.sites
    assert scope["settings"].static_scales == served.settings.static_scales

    def post(path, body):
        body["sampling_params"]["max_new_tokens"] = 6  # the served model has a context of 32
        return served.engine._post(served.engine.urls[0], path.strip("/"), body)

    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    outs = scope["rollout"](post, "docs", ["a", "b"], prompts)
    served.engine._wait_for("docs", ["a", "b"])
    tokens = [p + out["output_ids"] for p, out in zip(prompts, outs, strict=True)]
    exec(learner, scope)
    guidance = scope["Guidance"](served.out / "guidance" / "docs", ["a", "b"], tokens)
    for site, record in guidance.records.items():
        count, heads, blocks = record.scales.shape
        assert count == sum(len(t) - 1 for t in tokens)
        x = torch.randn(count, heads, blocks * 16, generator=torch.Generator().manual_seed(0)) * 1e-3
        x.requires_grad_()
        rounded = guidance.round(site, x)
        rounded.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        plain = numerics.fake_quantize(x, "nvfp4-exact", global_scale=torch.tensor(64.0))
        assert rounded.isfinite().all() and not torch.equal(plain, rounded)


def test_the_next_version_is_served_and_recorded(served):
    from tracekit.guidance import open_dataset

    greedy = {"temperature": 0.0, "topk": 8}
    before = ask(served.engine, "before", **greedy)
    with torch.no_grad():
        for i, p in enumerate(served.learner.model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    served.learner.refresh()
    served.learner.version = 4
    served.engine.load(served.learner.publish())
    after = ask(served.engine, "after", **greedy)
    assert np.abs(before.topk_logp[:, 0] - after.topk_logp[:, 0]).max() > 0.01
    data = open_dataset(served.out / "guidance" / "after")
    assert {v for name in data.ids() for v in data[name].policy_version} == {4}
    assert [p.name for p in (served.out / "published").iterdir()] == ["version_000004"]


def test_a_server_with_other_settings_is_refused(served):
    from dataclasses import replace

    from tracekit.rollout.sglang.handshake import shake_hands

    other = replace(served.settings, static_scales={**served.settings.static_scales, "layers.0.k": 32.0})
    client = served.connect(other)
    client.version = served.engine.version
    with pytest.raises(EngineError, match="other settings") as refused:
        shake_hands(client, VOCABULARY)
    assert refused.value.exit_code == 3


def test_weights_that_do_not_load_are_an_error_and_the_server_lives(served):
    body = {"model_path": str(served.out / "nothing"), "weight_version": "9"}
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        served.engine._post(served.engine.urls[0], "update_weights_from_disk", body)
    assert len(ask(served.engine, "lives").tokens) == 6


def test_a_server_that_does_not_answer_is_named(served):
    client = served.connect(served.settings)
    client._timeout = 2
    stopped = family(served.process)
    for member in stopped:
        member.suspend()
    start = time.monotonic()
    try:
        with pytest.raises(EngineError, match=f"{served.port}/update_weights_from_disk.*did not answer within 2 s"):
            client.load(served.learner.publish())
    finally:
        for member in stopped:
            member.resume()
    assert time.monotonic() - start < 10


def test_a_killed_server_is_named(served):
    end(served.process)
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"127.0.0.1:{served.port}") as dead:
        served.engine.load(served.learner.publish())
    assert time.monotonic() - start < 20 and len(str(dead.value).splitlines()) <= 3
    with pytest.raises(EngineError, match="tracekit serve"):
        served.connect(served.settings, timeout=1)


@pytest.mark.long
def test_a_server_that_is_started_again_serves_the_same_run(served):
    from tracekit.rollout.sglang.handshake import shake_hands

    end(served.process)
    served.process = start_server(served.out / "engine_model", served.port, served.log)
    wait_for(served.process, served.port)
    engine = served.connect(served.settings)
    engine.load(served.learner.publish())
    shake_hands(engine, VOCABULARY)
    rollouts = ask(engine, "again")
    assert json.dumps(rollouts.trajectory) == json.dumps([f"r{i}" for i in range(6)])
    served.process.terminate()  # it ends by itself, and leaves a whole dataset
    served.process.wait(60)
    assert all(report["sealed"] and not report["damage"] for report in verify(served.out / "guidance" / "again"))
