"""A real SGLang engine with the plugin: what it records is what it computed, whatever its scheduler did."""

import asyncio

import numpy as np
import pytest
import torch
from engine_sizes import CHUNK, VOCABULARY

from tracekit.errors import EngineError
from tracekit.guidance import verify


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist()


def shares(a, b, name_a, name_b, count):
    """Share of equal codes and of equal scales over the first `count` tokens of two records."""
    codes, scales = [], []
    left, right = a.data.read_batch([name_a], 0, [count]), b.data.read_batch([name_b], 0, [count])
    for site in left:
        codes.append((left[site].codes == right[site].codes).mean())
        scales.append((left[site].scales == right[site].scales).mean())
    return float(np.mean(codes)), float(np.mean(scales))


def test_a_response_is_recorded_as_it_was_computed(ask, recomputed):
    result = ask([prompt(24)], 8, flush=True)
    recomputed(result)
    record = result.data["r0"]
    assert record.n_tokens == 24 + 8 - 1 and record.n_ids == 32
    (out,) = result.outs
    assert len(out["meta_info"]["output_token_logprobs"]) == 8


@pytest.mark.parametrize("length", [k * CHUNK + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_prompts_around_the_chunk_boundaries(ask, recomputed, length):
    recomputed(ask([prompt(length, seed=length)], 3, flush=True))


def test_a_cached_prefix_has_the_rows_that_computed_it(ask, recomputed):
    first = ask([prompt(40)], 4, flush=True)
    second = ask([prompt(40) + [5, 6, 7]], 4)
    assert second.outs[0]["meta_info"]["cached_tokens"] >= 32
    recomputed(second)
    cached = second.outs[0]["meta_info"]["cached_tokens"]
    assert shares(first, second, "r0", "r0", cached) == (1.0, 1.0)
    alone = ask([prompt(40) + [5, 6, 7]], 4, flush=True)
    recomputed(alone)
    assert alone.outs[0]["meta_info"]["cached_tokens"] == 0
    codes, scales = shares(second, alone, "r0", "r0", 43)
    assert codes > 0.98 and scales > 0.98


def test_four_at_once_equal_each_alone_but_for_rounding(ask, recomputed):
    prompts = [prompt(20 + i, seed=i) for i in range(4)]
    together = ask(prompts, 8, flush=True)
    recomputed(together)
    for i, p in enumerate(prompts):
        alone = ask([p], 8, flush=True)
        codes, scales = shares(together, alone, f"r{i}", "r0", len(p))
        assert codes > 0.98 and scales > 0.98, (i, codes, scales)


async def send(engine, named, *, flush: bool, version: str | None = None):
    """Publish `named` tensors, in a session where this SGLang has them (up to 0.5.17 it has not)."""
    from sglang.srt.managers import io_struct

    manager = engine._engine.tokenizer_manager
    update = io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=engine._engine._serialize_tensors_per_rank(named, None),
        flush_cache=flush,
        weight_version=version,
    )
    if engine._has_sessions():
        await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
    done = await manager.update_weights_from_tensor(update, None)
    if engine._has_sessions():
        await manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None)
    assert done[0], done[1]


async def publish_noise(served, manager, mode):
    """Pause in `mode`, publish another head, go on."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    await asyncio.sleep(0.4)
    await manager.pause_generation(PauseGenerationReqInput(mode=mode))
    named = [("lm_head.weight", torch.randn(VOCABULARY, 64).bfloat16() * 0.1)]
    await send(served.engine, named, flush=False, version="in flight")
    await manager.continue_generation(ContinueGenerationReqInput())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_in_flight_marks_the_versions(served, ask, recomputed, mode):
    """`retract` prefills again under the new weights: the rows of tokens sampled before stay those that made them."""
    before = ask([prompt(6)], 2).data["r0"].extra["versions"]
    result = ask([prompt(10, seed=i) for i in range(2)], 140, flow=lambda m: publish_noise(served, m, mode), flush=True)
    recomputed(result, cache=mode == "in_place")  # a second prefill fills the cache anew
    for name, out in zip(result.names, result.outs, strict=True):
        spans = result.data[name].extra["versions"]
        assert [v for _, v in spans] == [before[0][1], before[0][1] + 1]
        assert 10 <= spans[1][0] < 149
        if (said := out["meta_info"].get("weight_versions")) is not None:  # 0.5.17 tells nothing of it
            # A row at position t computes the token at t + 1: the first row of the new version makes the first new one.
            assert abs(spans[1][0] - (10 + said[1]["start"] - 1)) <= 1, (spans, said)
    served.engine.load(served.learner.publish())


def test_a_request_that_ends_before_its_first_token_leaves_nothing(served, ask, recomputed):
    """Four others have the engine to themselves; the fifth waits, and is aborted while it does."""
    engine = served.engine._engine
    ended = []

    async def flow(manager):
        await asyncio.sleep(0.1)
        options = {"temperature": 0.0, "max_new_tokens": 4}
        waiting = engine.async_generate(
            input_ids=prompt(12), sampling_params=options, rid="aborted/r0", return_routed_experts=True
        )
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0.1)
        manager.abort_request(rid="aborted/r0")
        ended.extend(await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60))

    recomputed(ask([prompt(12, seed=i) for i in range(4)], 40, flow=flow))
    (end,) = ended
    assert isinstance(end, Exception) or end["meta_info"]["finish_reason"]["type"] == "abort"
    assert not list((served.folder / "aborted").glob("*"))


def test_a_request_that_is_pushed_out_and_then_aborted_leaves_nothing(served, ask, recomputed):
    """Both are taken off the engine in mid-response; one is aborted while it waits, the other goes on."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine = served.engine._engine
    ended = []

    async def flow(manager):
        options = {"temperature": 0.0, "max_new_tokens": 140, "ignore_eos": True}
        running = engine.async_generate(
            input_ids=prompt(10, seed=9), sampling_params=options, rid="pushed_out/r0", return_routed_experts=True
        )
        task = asyncio.create_task(running)
        await asyncio.sleep(0.4)
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        manager.abort_request(rid="pushed_out/r0")
        ended.extend(await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60))
        await manager.continue_generation(ContinueGenerationReqInput())

    result = ask([prompt(10)], 140, flow=flow, flush=True)
    recomputed(result, cache=False)
    (end,) = ended
    assert isinstance(end, Exception) or end["meta_info"]["finish_reason"]["type"] == "abort"
    assert not list((served.folder / "pushed_out").glob("*"))


def test_a_published_version_is_served_and_the_old_prefixes_are_gone(served, ask, recomputed):
    first = ask([prompt(30)], 2, flush=True)
    with torch.no_grad():
        for p in served.learner.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    served.learner.refresh()
    served.learner.version += 1
    served.engine.load(served.learner.publish())
    second = ask([prompt(30)], 2)
    assert second.outs[0]["meta_info"]["cached_tokens"] == 0
    recomputed(second)
    codes, _ = shares(first, second, "r0", "r0", 30)
    assert codes < 0.95


def test_a_plain_update_publishes_the_same(served, ask, recomputed, monkeypatch):
    """As on releases without update sessions: one call. This one wants a session around it, so the test holds it."""
    engine, learner = served.engine, served.learner
    if not engine._has_sessions():
        pytest.skip("this SGLang has no sessions: every other test publishes by plain updates")
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    manager = engine._engine.tokenizer_manager
    with torch.no_grad():
        for p in learner.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    learner.refresh()
    learner.version += 1
    before = ask([prompt(30)], 2, flush=True)
    engine.load(learner.publish())
    in_session = ask([prompt(30)], 2)
    engine._run(_spoil(engine, learner.publish()), "spoiling")
    spoiled = ask([prompt(30)], 2, flush=True)

    monkeypatch.setattr(engine, "_has_sessions", lambda: False)
    with pytest.raises(EngineError, match=f"publishing version {learner.version} failed"):
        engine.load(learner.publish())
    learner.version += 1
    engine._run(manager.begin_weight_update(BeginWeightUpdateReqInput(), None), "begin")
    engine.load(learner.publish())
    engine._run(manager.end_weight_update(EndWeightUpdateReqInput(), None), "end")
    plain = ask([prompt(30)], 2)
    assert plain.outs[0]["meta_info"]["cached_tokens"] == 0
    recomputed(plain)
    assert set(plain.data["r0"].policy_version) == {learner.version}
    logp = {
        name: [entry[0] for entry in result.outs[0]["meta_info"]["output_token_logprobs"]]
        for name, result in (("before", before), ("session", in_session), ("spoiled", spoiled), ("plain", plain))
    }
    assert logp["plain"] == logp["session"]
    assert logp["before"] != logp["session"] != logp["spoiled"]


async def _spoil(engine, weights):
    """Other values for every tensor, so that one that is not published would show."""
    named = [(name, torch.randn_like(t.float()).bfloat16() * 0.1) for name, t in engine._tensors(weights).items()]
    await send(engine, named, flush=True)


def test_weights_that_are_no_numbers_are_refused(served):
    weights = served.learner.publish()
    weights.dense["norm.weight"] = weights.dense["norm.weight"] * float("nan")
    with pytest.raises(EngineError, match="log-prob of nan"):
        served.engine.load(weights)
    served.engine.load(served.learner.publish())


def test_what_is_on_disk_passes_verify(served, ask):
    result = ask([prompt(20)], 4)
    ask([prompt(20)], 4)  # another step: the one before is sealed
    reports = verify(served.folder / result.step)
    assert reports and all(not r["damage"] for r in reports)
    assert all(r["sealed"] for r in reports)
