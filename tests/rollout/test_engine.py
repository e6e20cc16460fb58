"""The in-process engine against the learner: two implementations of one model."""

import numpy as np
import pytest
import torch

from tracekit.config.schema import Config, ModelConfig, QuantConfig
from tracekit.errors import EngineError
from tracekit.learner.calibrate import profiles
from tracekit.learner.guide import Guide
from tracekit.learner.learner import Learner
from tracekit.learner.packing import microbatches
from tracekit.rollout.engine import InProcessEngine
from tracekit.rollout.protocol import Rollouts

EOS, PAD, VOCAB = 1, 0, 16
MODEL = ModelConfig(dim=64, n_layers=3, head_dim=32, moe_hidden=64, max_seq_len=48)
PROMPTS = [[2, 5, 9], [3, 4, 8, 11, 12], [7], [2, 2, 2, 6]]


def build(experts="none", kv="none", global_scale="token", dtype=torch.float32, seed=3):
    config = Config(seed=seed, model=MODEL, quant=QuantConfig(experts=experts, kv=kv, global_scale=global_scale))
    learner = Learner(config, VOCAB, device=torch.device("cpu"))
    engine = InProcessEngine(config.model, config.quant, eos_id=EOS, pad_id=PAD, static_scales=None, dtype=dtype)
    engine.load(learner.publish())
    return config, learner, engine


def sample(engine, temperature=1.0, seed=0, group_size=4):
    return engine.generate(PROMPTS, group_size=group_size, temperature=temperature, max_response_len=12, seed=seed)


@torch.no_grad()
def learner_logp(config, learner, rollouts, temperature=1.0, replay=True):
    """Learner's log-prob of each sampled token, [N, R] as the engine reports it."""
    out = np.zeros_like(rollouts.logp_mu)
    n = len(rollouts.group)
    for batch in microbatches(
        rollouts,
        np.zeros(n, np.float32),
        which=np.arange(n),
        row_len=48,
        max_tokens=192,
        pad_id=PAD,
        replay=replay,
        device=torch.device("cpu"),
    ):
        guide = Guide(profiles=profiles(config), static_scales=None, routes=batch.routes)
        logp, _ = learner.logp(batch, guide, temperature=temperature)
        uid = batch.token_uid[batch.mask].numpy()
        row = uid >> 32
        out[row, (uid & 0xFFFFFFFF) - (rollouts.prompt_len[row] - 1)] = logp[batch.mask].numpy()
    return out


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("replay", [True, False])
def test_logp_equals_the_learners_without_quantisation(temperature, replay):
    config, learner, engine = build()
    rollouts = sample(engine, temperature)
    found = learner_logp(config, learner, rollouts, temperature, replay)
    np.testing.assert_allclose(found, rollouts.logp_mu, atol=2e-5)


@pytest.mark.parametrize("kv", ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"])
@pytest.mark.parametrize("experts", ["nvfp4-exact", "mxfp4-rceil"])
def test_quantised_forwards_agree_but_for_flips_and_quantisation_matters(experts, kv):
    config, learner, engine = build(experts, kv)
    rollouts = sample(engine)
    gap = np.abs(learner_logp(config, learner, rollouts) - rollouts.logp_mu)
    assert np.median(gap[rollouts.logp_mu != 0]) < 1e-3
    plain, plain_learner, _ = build()
    moved = np.abs(learner_logp(plain, plain_learner, rollouts) - rollouts.logp_mu)
    assert np.median(moved[rollouts.logp_mu != 0]) > 1e-2


def test_bf16_engine_is_close_to_the_learner_and_not_equal():
    config, learner, engine = build(dtype=torch.bfloat16)
    rollouts = sample(engine)
    gap = np.abs(learner_logp(config, learner, rollouts) - rollouts.logp_mu).max()
    assert 1e-5 < gap < 0.2


def test_a_response_depends_on_its_seed_and_prompt_alone():
    _, _, engine = build()
    a, b, c = sample(engine, seed=1), sample(engine, seed=1), sample(engine, seed=2)
    assert (a.tokens == b.tokens).all() and (a.logp_mu == b.logp_mu).all()
    assert (a.tokens != c.tokens).any()
    alone = engine.generate([PROMPTS[1]], group_size=1, temperature=0, max_response_len=12, seed=0)
    together = sample(engine, temperature=0, group_size=1)
    n = len(PROMPTS[1]) + int(alone.response_len[0])
    assert (alone.tokens[0, :n] == together.tokens[1, :n]).all()


def test_rollout_shapes_and_ends():
    _, _, engine = build()
    r = sample(engine)
    assert r.version == 0 and (r.group == np.repeat(np.arange(4), 4)).all()
    for row in range(len(r.group)):
        end = r.prompt_len[row] + r.response_len[row] - 1
        assert r.finished[row] == (r.tokens[row, end] == EOS)
        assert r.finished[row] or r.response_len[row] == 12
        assert (r.tokens[row, end + 1 :] == PAD).all()
        assert (r.logp_mu[row, : r.response_len[row]] < 0).all()
        routes = r.routes[row, : r.n_input[row]]
        assert (routes[..., 0] != routes[..., 1]).all()


def test_engine_errors_name_the_cause():
    config, learner, engine = build()
    fresh = InProcessEngine(MODEL, QuantConfig(), eos_id=EOS, pad_id=PAD, static_scales=None)
    with pytest.raises(EngineError, match="no weights yet"):
        sample(fresh)
    with pytest.raises(EngineError, match="max_seq_len"):
        engine.generate([[2] * 40], group_size=1, temperature=1.0, max_response_len=12, seed=0)
    weights = learner.publish()
    del weights.dense["norm.weight"]
    with pytest.raises(EngineError, match="norm.weight"):
        engine.load(weights)


def test_top_log_probs_are_of_the_sampled_positions():
    _, _, engine = build()
    whole = engine.generate(PROMPTS, group_size=2, temperature=0.8, max_response_len=12, seed=1, topk=128)
    top = engine.generate(PROMPTS, group_size=2, temperature=0.8, max_response_len=12, seed=1, topk=3)
    assert (whole.tokens == top.tokens).all() and whole.topk_ids.shape == (8, 12, VOCAB)
    sampled = whole.sampled
    np.testing.assert_allclose(np.exp(whole.topk_logp[sampled]).sum(-1), 1, atol=1e-5)
    assert (np.diff(whole.topk_logp[sampled], axis=-1) <= 0).all()
    np.testing.assert_array_equal(top.topk_ids[sampled], whole.topk_ids[sampled][:, :3])
    for row in range(8):
        for t in range(int(whole.response_len[row])):
            token = whole.tokens[row, whole.prompt_len[row] + t]
            (at,) = np.flatnonzero(whole.topk_ids[row, t] == token)
            assert whole.topk_logp[row, t, at] == whole.logp_mu[row, t]
    assert (whole.topk_logp[~sampled] == -np.inf).all()
    assert sample(engine).topk_ids is None


def test_rows_can_be_selected_and_joined():
    _, _, engine = build()
    a = engine.generate(PROMPTS[:2], group_size=2, temperature=1.0, max_response_len=6, seed=1, topk=2)
    b = engine.generate(PROMPTS[1:], group_size=2, temperature=1.0, max_response_len=6, seed=2, topk=2)
    a.trajectory, b.trajectory = [f"a{i}" for i in range(4)], [f"b{i}" for i in range(6)]
    both = Rollouts.concat([b, a])
    assert both.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and both.trajectory[6] == "a0"
    for row, (part, at) in enumerate([(b, i) for i in range(6)] + [(a, i) for i in range(4)]):
        n = int(part.prompt_len[at] + part.response_len[at])
        assert (both.tokens[row, :n] == part.tokens[at, :n]).all()
        assert (both.routes[row, : n - 1] == part.routes[at, : n - 1]).all()
        assert (both.topk_ids[row] == part.topk_ids[at]).all()
    some = both.select(np.isin(both.group, [1, 4]))
    assert some.group.tolist() == [0, 0, 1, 1] and some.trajectory == ["b2", "b3", "a2", "a3"]
    b.version = 7
    with pytest.raises(ValueError, match="several policy versions"):
        Rollouts.concat([a, b])
