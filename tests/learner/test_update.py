"""Reference, critic, filters, ACRL's X and what a step reports, on a tiny loop."""

import json

import numpy as np
import pytest
import torch
from loop_fixtures import build, gradients, opened

from tracekit import numerics
from tracekit.errors import DataError
from tracekit.guidance import open_dataset
from tracekit.learner.gaps import SiteGaps
from tracekit.learner.guide import SiteRecord, guided, quantize_site
from tracekit.learner.loop import trim_histograms
from tracekit.learner.reference import Reference
from tracekit.objectives.metrics import Metrics

NO_GUIDANCE = ("--guidance.bits", "0")


def draws(built):
    """A `draw` as the run's: the next problems of the training set."""
    at = [0]

    def draw(count):
        start, at[0] = at[0], at[0] + count
        return [built.task.train[i] for i in range(start, start + count)]

    return draw


# -- reference


def test_the_reference_is_the_start_and_stays_there(tmp_path):
    built = build(tmp_path, "--algo.kl-coef", "0.5")
    x = opened(built)
    old, ref = x.tokens.values["logp_old"], x.tokens.values["logp_ref"]
    assert (old == ref).all()  # the same weights, guide and routes
    built.loop.update.mini_step(x, np.arange(16))
    again = opened(built, step=2)
    assert np.abs(again.tokens.values["logp_ref"] - again.tokens.values["logp_old"]).max() > 1e-4
    later = Reference(built.config, built.learner, built.run, fresh=False)
    for name, weight in later.model.state_dict().items():
        torch.testing.assert_close(weight, built.loop.update.reference.model.state_dict()[name], msg=name)
    (built.run.checkpoints / "reference" / "weights.pt").unlink()
    with pytest.raises(DataError, match="reference policy"):
        Reference(built.config, built.learner, built.run, fresh=False)


def test_kl_pulls_towards_the_reference(tmp_path):
    """With no advantage left, only the KL term moves the weights, and it lowers the KL."""
    built = build(tmp_path, "--algo.kl-coef", "1.0", "--optim.lr", "1e-4", *NO_GUIDANCE)
    x = opened(built)
    with torch.no_grad():
        for p in built.learner.model.parameters():
            p.mul_(1 + 0.03 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view_as(p))
    built.learner.refresh()
    x.advantages = np.zeros_like(x.advantages)
    kl = [built.loop.update.mini_step(x, np.arange(16)).metrics.finalize()["policy/kl_ref"] for _ in range(8)]
    assert kl[0] > 0 and kl[-1] < kl[0]


# -- critic


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_values_are_those_of_the_position_that_predicts_the_token(tmp_path, kind):
    built = build(tmp_path, "--algo.name", "ppo", "--algo.critic", kind, *NO_GUIDANCE, "--quant.experts", "none",
                  "--quant.kv", "none", "--replay.routing", "off")  # fmt: skip
    torch.nn.init.normal_(built.critic.head.weight)
    x = opened(built)
    network = built.critic.network or built.learner
    r = x.rollouts
    for row in (0, 5, 15):
        first, n = int(r.prompt_len[row]) - 1, int(r.response_len[row])
        tokens = torch.from_numpy(r.tokens[row : row + 1, : first + n])
        positions = torch.arange(first + n)[None]
        causal = torch.ones(first + n, first + n, dtype=torch.bool).tril()[None, None]
        network.model._skip_lm_head = True
        with torch.no_grad(), guided(None):
            alone = built.critic.head(network.model(tokens, positions, causal))[0, first:, 0]
        network.model._skip_lm_head = False
        np.testing.assert_allclose(x.tokens.values["values"][row, :n], alone.numpy(), atol=2e-5)
        assert (x.tokens.values["values"][row, n:] == 0).all()


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_critic_learns_its_targets(tmp_path, kind):
    built = build(
        tmp_path, "--algo.name", "ppo", "--algo.critic", kind, "--algo.critic-lr", "1e-2", "--algo.value-clip", "9",
        *NO_GUIDANCE,
    )  # fmt: skip
    x = opened(built)
    assert (x.tokens.values["values"] == 0).all()
    # lambda = gamma = 1 and values of 0: every token's return is the response's reward
    expected = np.where(x.rollouts.sampled, x.rewards[:, None], 0)
    np.testing.assert_allclose(x.tokens.values["returns"], expected, atol=1e-6)
    flat = x.advantages[x.rollouts.sampled]
    assert flat.mean() == pytest.approx(0, abs=1e-5) and flat.std() == pytest.approx(1, abs=1e-3)
    said = [built.loop.update.mini_step(x, np.arange(16)).metrics.finalize() for _ in range(12)]
    assert said[-1]["critic/loss"] < 0.8 * said[0]["critic/loss"]
    assert said[-1]["critic/explained_variance"] > said[1]["critic/explained_variance"]


def test_a_shared_critic_reaches_the_policy_by_vf_coef(tmp_path):
    norms = {}
    for share in ("0", "0.1", "0.2"):
        built = build(
            tmp_path / share, "--algo.name", "ppo", "--algo.critic", "shared", "--algo.vf-coef", share, *NO_GUIDANCE
        )
        torch.nn.init.constant_(built.critic.head.weight, 0.1)
        x = opened(built)
        x.advantages = np.zeros_like(x.advantages)
        grads, _ = gradients(built, x)
        norms[share] = grads["layers.0.attention.wo.weight"].norm(), grads["critic.weight"].norm()
    assert norms["0"][0] == 0 and norms["0.1"][0] > 0
    torch.testing.assert_close(norms["0.2"][0], 2 * norms["0.1"][0], rtol=1e-3, atol=0)
    torch.testing.assert_close(norms["0.2"][1], norms["0"][1], rtol=1e-5, atol=0)


def test_kl_in_the_reward_is_in_the_returns(tmp_path):
    built = build(tmp_path, "--algo.name", "ppo", "--algo.critic", "shared", "--algo.kl-reward-coef", "0.5")
    x = opened(built)
    x.tokens.values["logp_ref"] = x.tokens.values["logp_old"] - np.where(x.rollouts.sampled, 0.2, 0).astype(np.float32)
    built.loop.update.advantages(x)
    first = x.rewards - 0.5 * 0.2 * x.rollouts.response_len
    np.testing.assert_allclose(x.tokens.values["returns"][:, 0], first, atol=1e-5)


# -- filters


def test_dynamic_sampling_fills_the_batch_with_mixed_prompts(tmp_path):
    built = build(
        tmp_path, "--algo.name", "dapo", "--algo.dynamic-sampling", "--algo.overlong-buffer", "3",
        "--algo.overlong-penalty", "0.5", "--log.rollouts",
    )  # fmt: skip
    scores = np.random.default_rng(0)

    def grade(problems, rollouts):  # two of three prompts are all wrong
        mixed = np.array([i % 3 == 0 for i in range(len(problems))])
        coins = scores.integers(0, 2, len(rollouts.group))
        coins[::4] = 1 - coins[1::4]  # of a group's four responses two differ
        return (mixed[rollouts.group] * coins).astype(np.float32)

    built.loop.sampler.grade = grade
    metrics = built.loop.step(draws(built), 1)
    # 4 prompts a round, 2 of them mixed: two rounds
    assert metrics["sampling/rounds"] == 2 and metrics["sampling/kept_frac"] == 0.5
    assert metrics["reward/accuracy"] < metrics["policy/responses"]
    lines = [json.loads(s) for s in (built.run.rollouts / "step_000001.jsonl").read_text().splitlines()]
    assert len(lines) == 32 and sum(line["kept"] for line in lines) == 16
    assert len({line["trajectory"] for line in lines}) == 32
    by_prompt = {}
    for line in lines:
        assert line["reward"] == pytest.approx(line["accuracy"] - 0.5 * max(line["tokens"] - 3, 0) / 3)
        by_prompt.setdefault(line["trajectory"].rpartition(".")[0], []).append(line)
    for siblings in by_prompt.values():
        assert siblings[0]["kept"] == (len({line["accuracy"] for line in siblings}) == 2)
    reader = open_dataset(built.loop.sampler.folder(1))
    assert len(reader) == 8 + 32


def test_dynamic_sampling_gives_up_after_its_rounds(tmp_path):
    built = build(tmp_path, "--algo.dynamic-sampling", "--algo.max-sampling-rounds", "2")
    built.loop.sampler.grade = lambda problems, rollouts: np.zeros(len(rollouts.group), np.float32)
    with pytest.raises(DataError, match="0 of 4 prompts usable after 2 rounds"):
        built.loop.step(draws(built), 1)


def test_overlong_filter_takes_cut_responses_out_of_the_loss_alone(tmp_path):
    built = build(tmp_path, "--algo.overlong-filter", *NO_GUIDANCE)
    x = opened(built)
    finished = x.rollouts.finished
    assert 0 < finished.sum() < 16
    done = built.loop.update.mini_step(x, np.arange(16)).metrics.finalize()
    assert done["policy/responses"] == finished.sum()
    assert done["policy/tokens"] == x.rollouts.response_len[finished].sum()
    assert (x.tokens.values["logp_old"][x.rollouts.sampled] < 0).all()


# -- X and Y


def test_x_is_of_the_unfiltered_responses_and_is_kept(tmp_path):
    built = build(tmp_path, "--algo.correction", "acrl", "--algo.dynamic-sampling")
    rng = np.random.default_rng(1)
    built.loop.sampler.grade = lambda p, r: (
        np.repeat(np.arange(len(p)) % 2, 4) * rng.permutation([1, 1, 0, 0] * len(p)).clip(0, 1).astype(np.float32)
    )
    draw = draws(built)
    built.loop.step(draw, 1)
    state = built.loop.objective.state
    x, source, count = state.x, state.x_source, state.x_responses
    assert source == "reference" and count > 16 and x > 0
    built.loop.step(draw, 2)
    assert state.x == x and built.loop.state.objective == {"x": x, "x_source": source, "x_responses": count}


def test_x_on_a_baseline_set(tmp_path):
    built = build(tmp_path, "--algo.correction", "acrl", "--algo.x-baseline-prompts", "6")
    metrics = built.loop.step(draws(built), 1)
    state = built.loop.objective.state
    assert (state.x_source, state.x_responses) == ("reference", 24)
    assert metrics["acrl/X"] == pytest.approx(state.x) and metrics["acrl/Y_mean"] > 0
    assert (built.loop.sampler.folder(0)).exists()


def test_any_run_measures_y(tmp_path):
    built = build(tmp_path, "--algo.name", "gspo", "--algo.correction", "none")
    metrics = built.loop.step(draws(built), 1)
    assert metrics["acrl/Y_mean"] > 0 and metrics["acrl/Y_over_X_mean"] == pytest.approx(1, abs=1e-3)
    assert built.loop.objective.state.x_source == "step0"


# -- what a step reports


def test_sums_of_mini_steps_are_not_added(tmp_path):
    built = build(tmp_path, *NO_GUIDANCE)
    metrics = built.loop.step(draws(built), 1)
    assert metrics["policy/responses"] == 8  # of 16, in two mini-steps
    assert metrics["policy/loss"] == pytest.approx((metrics["mini_step/0/loss"] + metrics["mini_step/1/loss"]) / 2)
    assert metrics["actor/grad_norm"] == pytest.approx(
        (metrics["mini_step/0/grad_norm"] + metrics["mini_step/1/grad_norm"]) / 2
    )
    # the opening pass packs all prompts and a mini-step half of them: products may sum in another order
    assert metrics["mini_step/0/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/on_policy/kl_k3"] == pytest.approx(metrics["mismatch/kl_k3"])
    assert "mismatch/stale/kl_k3" not in metrics


def test_stale_rollouts_are_told_apart(tmp_path):
    built = build(tmp_path, *NO_GUIDANCE)
    x = opened(built)
    built.learner.version += 2
    done = built.loop.update.mini_step(x, np.arange(16)).metrics.finalize()
    assert "mismatch/stale/kl_k3" in done and "mismatch/on_policy/kl_k3" not in done


def test_histograms_are_a_line_a_step_and_resume_takes_steps_again(tmp_path):
    built = build(tmp_path, *NO_GUIDANCE)
    draw = draws(built)
    tokens = [built.loop.step(draw, step)["policy/tokens"] for step in (1, 2)]
    path = built.run.logs / "histograms.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line, mean in zip(lines, tokens, strict=True):
        assert sum(line["hist/ratio"]["counts"]) == 2 * mean
        assert line["hist/mismatch_ratio"]["lines"] == [5.0]
    with open(path, "a") as file:
        file.write('{"step": 3, "hist')
    trim_histograms(built.run, 1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


def test_advice_is_given_once_a_kind(tmp_path):
    notes = []
    built = build(tmp_path, "--algo.name", "tbpo", "--algo.correction", "none", note=notes.append)
    built.loop.objective.advice = lambda metrics, mini_step: f"about mini-step {mini_step}"
    for mini_step in (0, 1, 2, 0):
        built.loop.advise(Metrics(), mini_step)
    assert notes == ["about mini-step 0", "about mini-step 1"]


def test_narrow_bands_are_said(tmp_path):
    notes = []
    built = build(
        tmp_path, "--algo.name", "tbpo", "--algo.correction", "none", "--algo.knobs.seq_clip_ratio_high", "0.0",
        "--algo.knobs.neg_seq_clip_ratio_low", "0.0", "--algo.knobs.neg_seq_clip_ratio_high", "0.0", *NO_GUIDANCE,
        note=notes.append,
    )  # fmt: skip
    x = opened(built)
    x.advantages = -np.ones_like(x.advantages)
    for i in range(3):
        built.loop.advise(built.loop.update.mini_step(x, np.arange(16)).metrics, i)
    (text,) = notes
    assert "the bands are too narrow" in text and "85%" in text


# -- by layer


def test_by_layer_covers_every_recorded_site(tmp_path):
    built = build(tmp_path, "--log.by-layer", "--guidance.layers", "last:1", "--guidance.bits", "4")
    metrics = built.loop.step(draws(built), 1)
    found = {k.split("/", 2)[2] for k in metrics if k.startswith("mismatch/by_layer/")}
    kinds = ("codes_differ_frac", "scales_differ_frac", "rel_diff")
    assert found == {f"1/{site}/{kind}" for site in ("k", "v", "moe_input") for kind in kinds}
    for name in found:
        assert 0 < metrics[f"mismatch/by_layer/{name}"] < 0.5, name


def test_gaps_count_real_tokens_alone():
    x = torch.tensor([[[1.0] * 16], [[2.0] * 16], [[5.0] * 16]])
    scale = torch.tensor(448.0)
    from tracekit import numerics

    own, codes, scales = numerics.quantize_dequantize(x, "nvfp4-exact", global_scale=scale)
    record = SiteRecord(codes=numerics.low_bits(codes, 1), scales=scales.clone(), bits=1, global_scale=scale)
    record.codes[0, 0, :4] ^= 1
    record.codes[2] ^= 1
    record.scales[1, 0, 0] += 1
    guided_values = own.clone()
    guided_values[0] *= 2
    gaps = SiteGaps()
    gaps.real = torch.tensor([True, True, False])
    gaps.add("layers.3.k", x, guided_values, record, profile="nvfp4-exact", scale=scale)
    found = gaps.metrics()
    assert found["mismatch/by_layer/3/k/codes_differ_frac"] == 4 / 32
    assert found["mismatch/by_layer/3/k/scales_differ_frac"] == 1 / 2
    norm = float(own[:2].double().norm())
    assert found["mismatch/by_layer/3/k/rel_diff"] == pytest.approx(float(own[0].double().norm()) / norm)


# -- encodings that the learner completes

WIDE = ("--model.dim", "256", "--model.head-dim", "128", "--log.by-layer")


@pytest.mark.parametrize("encoding", ["compact", "low2", "rm15"])
def test_an_encoding_gives_the_learner_what_lossless_does(tmp_path, encoding):
    """Wide enough rows are stored without what the learner's activations restore; its forward is the same but for
    rows that fail their check, which are counted and rounded by the learner's own scale."""
    whole, less = (build(tmp_path / e, *WIDE, "--guidance.encoding", e) for e in ("lossless", encoding))
    expected, found = (b.loop.experience(b.loop.sampler.fill(draws(b), 1), 1) for b in (whole, less))
    assert found[0].reader.site("layers.0.moe_input").encoding == encoding
    if encoding == "rm15":  # the others gain where scales compress badly, which an untrained model's do not
        assert less.loop.sampler.guidance_bytes < whole.loop.sampler.guidance_bytes
    metrics = found[1]
    assert 0 <= metrics["guidance/rows_fallback_frac"] < 0.02
    assert "guidance/rows_fallback_frac" not in expected[1]
    a, b = (x.tokens.values["logp_old"] for x, _ in (expected, found))
    assert np.abs(a - b).mean() < 0.02 * np.abs(a - expected[0].rollouts.logp_mu).mean() + 1e-6


def test_a_row_that_fails_its_check_is_rounded_by_the_learner(tmp_path):
    built = build(tmp_path, *WIDE, "--guidance.encoding", "compact")
    x = opened(built)
    update = built.loop.update
    batch = next(iter(update.batches(x.rollouts, x.advantages, np.arange(16))))
    guide = update.guide(batch, x)
    site = "layers.0.moe_input"
    record = guide.records[site]
    record.stored.checks[:] ^= 0x5A5A  # every row of the site
    values = torch.randn(record.total, 256)
    with guided(guide):
        guide.decoded = {}
        out = quantize_site(site, values)
        assert guide.decoded["rows_fallback"] > 0.9 * guide.decoded["rows"] > 0
    own = numerics.fake_quantize(values, "nvfp4-exact", global_scale=record.global_scale)
    given_up = guide.decoded["rows_fallback"] / guide.decoded["rows"]
    assert (out[record.at] == own[record.at]).all(1).double().mean() >= given_up
