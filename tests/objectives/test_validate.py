"""Combinations that contradict themselves are refused, saying what to change."""

from dataclasses import dataclass, field

import pytest
import torch
from objective_fixtures import f1

from tracekit.errors import ConfigError, DataError
from tracekit.objectives import CORRECTIONS, LOSSES, from_config, policy_loss, validate

BAD = [
    (dict(name="grop"), "did you mean 'grpo'"),
    (dict(name="grpo", correction="tiss"), "did you mean 'tis'"),
    (dict(name="grpo", correction="tis+mis"), "exactly one correction"),
    (dict(name="grpo", clip_ratio_hihg=0.3), "did you mean 'clip_ratio_high'"),
    (dict(name="grpo", correction="none", is_cap=5.0), "no knob 'is_cap'"),
    (dict(name="tbpo", correction="tis"), "correct twice"),
    (dict(name="dppo_tv", correction="acrl"), "correct twice"),
    (dict(name="reinforce", correction="tis"), "correct twice"),
    (dict(name="reinforce", correction="verl", rollout_is="token"), "two-policy"),
    (dict(name="grpo", bypass=True, correction="tis"), "bypass"),
    (dict(name="grpo", bypass=True, correction="acrl"), "bypass"),
    (dict(name="tbpo", bypass=True), "no meaning"),
    (dict(name="grpo", correction="score_centering"), "reinforce only"),
    (dict(name="reinforce", correction="score_centering", ratio_level="sequence"), "token or none"),
    (dict(name="gspo", correction="acrl"), "defined on"),
    (dict(name="gspo", correction="qurl"), "upper clip bound"),
    (dict(name="dr_grpo"), "loss_max_length"),
    (dict(name="gspo", advantage="gae"), "one advantage a response"),
    (dict(name="grpo", clip_ratio_c=0.9), "above 1"),
    (dict(name="grpo", clip_ratio_low=1.5), r"\[0, 1\]"),
    (dict(name="grpo", clip_ratio_low="wide"), "wrong type"),
    (dict(name="grpo", correction="acrl", gamma=0.0), "above 0"),
    (dict(name="grpo", correction="acrl", is_cap=1.0), "above 1"),
    (dict(name="grpo", correction="acrl", y_level="token"), "none of sequence, group, batch"),
    (dict(name="grpo", correction="mis", is_low=3.0, is_cap=2.0), "is_low"),
    (dict(name="grpo", correction="icepop", icepop_low=6.0), "icepop_low"),
    (dict(name="grpo", loss_agg_mode="token_mean"), "did you mean 'token-mean'"),
    (dict(name="grpo", kl_estimator="k4"), "kl_estimator"),
    (dict(name="grpo", correction="verl:decoupled_geo_sr"), "did you mean 'decoupled_geo_rs'"),
    (dict(name="grpo", correction="verl:bypass_pg_is"), "reinforce"),
    (dict(name="grpo", correction="verl", rollout_rs="token_k1,seq_k3", rollout_rs_threshold="1.2"), "2 statistics"),
    (dict(name="grpo", correction="verl", rollout_rs="seq_max_k1", rollout_rs_threshold="1.2"), "seq_max_k1"),
    (dict(name="tbpo", band_mode="mask"), "band_mode"),
]


@pytest.mark.parametrize(("knobs", "message"), BAD)
def test_refused(knobs, message):
    with pytest.raises(ConfigError, match=message) as error:
        policy_loss(**knobs)
    assert str(error.value).count("\n") <= 2 and error.value.exit_code == 2
    rest = {k: v for k, v in knobs.items() if k not in ("name", "correction")}
    with pytest.raises(ConfigError, match=message):
        validate(knobs["name"], knobs.get("correction", "none"), rest)


@pytest.mark.parametrize(
    ("rollout", "knobs", "message"),
    [
        (dict(top_p=0.95), dict(name="grpo"), "top_p=0.95"),
        (dict(top_k=50), dict(name="grpo"), "top_k=50"),
        (dict(group_size=1), dict(name="grpo"), "group_size=1"),
        (dict(topk_logprobs=20), dict(name="reinforce", correction="score_centering"), "topk_logprobs=128"),
        (dict(max_tokens=100), dict(name="dr_grpo", loss_max_length=50), "below"),
        (dict(max_response_len=100), dict(name="dr_grpo", loss_max_length=50), "below"),
    ],
)
def test_refused_with_the_rollout(rollout, knobs, message):
    rest = {k: v for k, v in knobs.items() if k not in ("name", "correction")}
    with pytest.raises(ConfigError, match=message):
        validate(knobs["name"], knobs.get("correction", "none"), rest, rollout)
    validate(knobs["name"], knobs.get("correction", "none"), rest)


def test_accepted_with_the_rollout():
    validate("grpo", "tis", {}, dict(top_p=0.9, keep_sampling_mask=True, group_size=8, top_k=0))
    validate("ppo", "acrl", {}, dict(group_size=1))
    validate("reinforce", "score_centering", {}, dict(topk_logprobs=128, top_k=-1, group_size=2))


def compatible():
    for name in LOSSES:
        for correction in CORRECTIONS:
            knobs = dict(loss_max_length=8) if name == "dr_grpo" else {}
            try:
                yield name, correction, policy_loss(name, correction=correction, **knobs)
            except ConfigError:
                continue


def test_every_accepted_pair_trains():
    """Finite and non-zero gradient for each pair of names that is not refused."""
    pairs = 0
    for name, correction, objective in compatible():
        b = f1()
        if objective.needs_topk:
            b = b.with_(
                logp_topk=torch.full((2, 3, 2), -1.0).requires_grad_(), logp_mu_topk=torch.full((2, 3, 2), -1.1)
            )
        if name in ("tbpo", "gspo"):
            b.logp = (b.logp_old + 1e-4).detach().requires_grad_()
        objective.begin_batch([b])
        out = objective(b)
        (grad,) = torch.autograd.grad(out.loss, b.logp)
        assert torch.isfinite(grad).all() and torch.isfinite(out.loss), (name, correction)
        if correction != "sequence_rejection":
            assert torch.count_nonzero(grad), (name, correction)
        torch.testing.assert_close(grad, out.coefficients, atol=1e-6, rtol=1e-5)
        pairs += 1
    assert pairs >= 50


def test_needs():
    assert policy_loss("ppo").needs_values and policy_loss("ppo").advantage == "gae"
    assert not policy_loss("ppo", advantage="grpo").needs_values
    assert policy_loss("grpo", kl_coef=0.1).needs_ref and not policy_loss("grpo").needs_ref
    assert policy_loss("grpo", entropy_coef=0.1).needs_entropy
    assert policy_loss("reinforce", correction="score_centering").needs_topk == 128
    assert policy_loss("grpo").needs_old and not policy_loss("reinforce").needs_old


@dataclass
class Algo:
    name: str = "grpo"
    correction: str = "tis"
    adv_std: str = "bessel"
    clip_ratio_high: float | None = 0.28
    is_cap: float | None = 5.0
    mini_steps: int = 2
    knobs: dict = field(default_factory=dict)


def test_from_config():
    objective = from_config(Algo(knobs=dict(is_level="sequence")), dict(group_size=4))
    assert objective.correction.knobs.is_cap == 5.0 and objective.correction.knobs.is_level == "sequence"
    assert objective.loss.knobs.clip_ratio_high == 0.28
    assert from_config(Algo(name="gspo", clip_ratio_high=None)).loss.knobs.clip_ratio_high == 4e-4
    assert from_config(Algo(correction="verl:decoupled_seq_is")).correction.knobs.rollout_is == "sequence"
    with pytest.raises(ConfigError, match="no knob 'gamma'"):
        from_config(Algo(knobs=dict(gamma=1.0)))


@pytest.mark.parametrize(
    ("knobs", "changes", "message"),
    [
        (dict(kl_coef=0.1), {}, "logp_ref"),
        (dict(entropy_coef=0.1), {}, "entropy"),
        ({}, dict(logp=None), "logp is None"),
        ({}, dict(advantages=torch.zeros(2)), "shape"),
        ({}, dict(segment_ids=torch.zeros(2, 3, dtype=torch.long)), "n_segments"),
    ],
)
def test_bad_batches(knobs, changes, message):
    with pytest.raises(DataError, match=message):
        policy_loss("grpo", **knobs)(f1().with_(**changes))


def test_surviving_denominator_needs_logp_where_dropping_does():
    objective = policy_loss("grpo", correction="opsm", opsm_reference="mu", opsm_delta=0.1, denominator="surviving")
    with pytest.raises(DataError, match="compute logp first"):
        objective.totals([f1().with_(logp=None)])
    assert float(objective.totals([f1()]).tokens) == 3
