"""Our losses, gradients and metrics against the numbers of TRL and verl (`peer_numbers.py` made the golden file)."""

import json
from pathlib import Path

import peer_numbers
import pytest
import torch

from tracekit.objectives import LossBatch, group_advantages, policy_loss
from tracekit.objectives.advantages import reinforce_pp_advantages, rloo_advantages
from tracekit.objectives.gae import Moments, gae, token_rewards, value_loss, whiten

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "objectives_peers.json").read_text())
GRPO = dict(name="grpo", clip_ratio_low=0.2, clip_ratio_high=0.2)
GSPO = dict(name="gspo", clip_ratio_low=0.05, clip_ratio_high=0.06)
VERL = GRPO | dict(clip_ratio_c=3.0)
TOKEN_IS = dict(correction="verl", rollout_is="token", rollout_is_threshold=1.3)
SEQUENCE_IS = dict(correction="verl", rollout_is="sequence", rollout_is_threshold=1.5)


def rs(statistic, bound, **more):
    return VERL | dict(
        correction="verl",
        rollout_rs=statistic,
        rollout_rs_threshold=bound,
        loss_agg_mode="token-mean",
        denominator="surviving",
        **more,
    )


OURS = {
    "trl/grpo": GRPO,
    "trl/grpo_kl": GRPO | dict(kl_coef=0.05, kl_estimator="k3"),
    "trl/dual_clip": GRPO | dict(clip_ratio_c=1.5),
    "trl/dapo": dict(name="dapo"),
    "trl/dr_grpo": dict(name="dr_grpo", loss_max_length=12),
    "trl/gspo": GSPO,
    # TRL's epsilon_high is the bound itself.
    "trl/cispo": dict(name="cispo", clip_ratio_high=0.28),
    "trl/opsm": GRPO | dict(correction="opsm", opsm_delta=0.02, opsm_reference="mu"),
    "trl/tis": GRPO | dict(correction="tis", is_cap=1.3),
    "trl/seq_tis": GRPO | dict(correction="tis", is_cap=1.5, is_level="sequence"),
    "trl/mis": GRPO | dict(correction="mis", is_cap=1.5),
    "trl/icepop": GRPO | dict(correction="icepop", icepop_low=0.7, icepop_high=1.4),
    "trl/gspo_mis": GSPO | dict(correction="mis", is_cap=1.5),
    "verl/grpo_dual": VERL,
    "verl/dual_clip": GRPO | dict(clip_ratio_c=1.5),
    "verl/dapo": dict(name="dapo", clip_ratio_c=3.0),
    "verl/gspo": GSPO,
    "verl/gspo_tis": GSPO | dict(correction="tis", is_cap=1.3),
    "verl/cispo": dict(name="cispo", clip_ratio_low=0.2, clip_ratio_high=0.28),
    "verl/dppo_tv": dict(name="dppo_tv", kl_tau=0.0),
    "verl/token_is": VERL | dict(correction="tis", is_cap=1.3),
    "verl/token_is_normalized": VERL | TOKEN_IS | dict(rollout_is_batch_normalize=True),
    "verl/seq_is": VERL | SEQUENCE_IS,
    "verl/seq_is_normalized": VERL | SEQUENCE_IS | dict(rollout_is_batch_normalize=True),
    "verl/icepop": VERL | dict(correction="verl", rollout_is="token", rollout_is_threshold="0.7_1.4"),
    # verl's k1 band is one on 1/rho, ours one on rho.
    "verl/rs_token_k1": VERL
    | dict(
        correction="token_rejection",
        reject_low=1 / 1.9,
        reject_high=1 / 0.7,
        loss_agg_mode="token-mean",
        denominator="surviving",
    ),
    "verl/rs_token_k3": rs("token_k3", "0.05"),
    "verl/rs_seq_sum_k1": rs("seq_sum_k1", "0.6_1.8"),
    "verl/rs_seq_mean_k1": rs("seq_mean_k1", "0.9_1.15"),
    "verl/rs_seq_max_k3": rs("seq_max_k3", "0.3"),
    "verl/rs_two": rs("token_k2,seq_mean_k3", "0.2,0.1", rollout_is="token", rollout_is_threshold=1.3),
}


def batch(with_ref=False) -> LossBatch:
    x = peer_numbers.tensors(GOLDEN["inputs"])
    return LossBatch(
        logp=x.logp,
        logp_old=x.logp_old,
        logp_mu=x.logp_mu,
        advantages=x.advantages[:, None].expand_as(x.logp),
        mask=x.mask,
        group=x.group,
        logp_ref=x.logp_ref if with_ref else None,
    )


def check(case, knobs, peer):
    b = batch(with_ref="kl_coef" in knobs)
    out = policy_loss(**knobs)(b)
    (grad,) = torch.autograd.grad(out.loss, b.logp)
    expected = torch.tensor(peer["grad"], dtype=torch.float64)
    assert expected.abs().max() > 1e-3, f"{case}: the peer's gradient is all zero, the case tests nothing"
    assert float(out.loss.detach()) == pytest.approx(peer["loss"], abs=1e-8)
    # verl divides by length + 1e-8, hence not tighter.
    torch.testing.assert_close(grad, expected, atol=1e-8, rtol=1e-7)
    torch.testing.assert_close(out.coefficients, expected, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("case", sorted(OURS))
def test_equals_golden(case):
    check(case, OURS[case], GOLDEN["cases"][case])


def test_every_golden_case_is_compared():
    assert set(OURS) == set(GOLDEN["cases"])


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_equals_installed_library(library):
    pytest.importorskip(library)
    cases = peer_numbers.trl_cases() if library == "trl" else peer_numbers.verl_cases()
    for case, peer in peer_numbers.run(cases, GOLDEN["inputs"]).items():
        check(case, OURS[case], peer)


def test_rejections_reject_something_and_not_everything():
    for case, knobs in OURS.items():
        if "rs_" in case or case in ("trl/mis", "trl/icepop", "trl/opsm"):
            share = policy_loss(**knobs)(batch()).metrics.finalize()["correction/drop_frac"]
            assert 0 < share < 1, case


def test_advantages_and_critic_equal_verl():
    x, verl = peer_numbers.tensors(GOLDEN["inputs"]), GOLDEN["verl_other"]
    assert group_advantages(x.rewards, x.group).tolist() == pytest.approx(verl["grpo_advantage"], abs=1e-6)
    assert rloo_advantages(x.rewards, x.group).tolist() == pytest.approx(verl["rloo_advantage"], abs=1e-6)
    r = token_rewards(x.rewards, x.mask)
    adv, returns = gae(r, x.values, x.mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(returns, torch.tensor(verl["returns"], dtype=torch.float64), atol=1e-6, rtol=1e-6)
    # verl divides by the Bessel variance and we by the population's: (n - 1) / n apart.
    n = int(x.mask.sum())
    ours = whiten(adv, x.mask, Moments.of(adv, x.mask)) * ((n - 1) / n) ** 0.5
    torch.testing.assert_close(ours, torch.tensor(verl["gae"], dtype=torch.float64), atol=1e-5, rtol=1e-5)
    values = x.values.clone().requires_grad_()
    out = value_loss(batch().with_(values=values, values_old=x.values_old, returns=returns), clip=0.5)
    (grad,) = torch.autograd.grad(out.loss, values)
    assert float(out.loss.detach()) == pytest.approx(verl["value_loss"], abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(verl["value_grad"], dtype=torch.float64), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(out.coefficients, grad, atol=1e-12, rtol=1e-9)
    assert out.metrics.finalize()["critic/vf_clipfrac"] == pytest.approx(verl["value_clipfrac"], abs=1e-6)


def test_reinforce_pp_differs_from_verl_by_what_it_normalises_over():
    """verl normalises the centred rewards over tokens (Bessel), we over responses."""
    x, verl = peer_numbers.tensors(GOLDEN["inputs"]), GOLDEN["verl_other"]
    theirs = torch.tensor(verl["reinforce_pp_baseline_token"], dtype=torch.float64)
    centred = group_advantages(x.rewards, x.group, "none")
    spread = centred[:, None].expand_as(x.logp).contiguous()
    n = int(x.mask.sum())
    over_tokens = whiten(spread, x.mask, Moments.of(spread, x.mask)) * ((n - 1) / n) ** 0.5
    torch.testing.assert_close(over_tokens, theirs, atol=1e-5, rtol=1e-5)
    ours = reinforce_pp_advantages(x.rewards, x.group)
    torch.testing.assert_close(ours, centred / centred.square().mean().sqrt(), atol=1e-6, rtol=1e-6)


def test_mismatch_metrics_equal_verl():
    ours = policy_loss("grpo")(batch()).metrics.finalize()
    names = {
        "kl": "kl_k1",
        "k3_kl": "kl_k3",
        "training_ppl": "ppl_train",
        "rollout_ppl": "ppl_rollout",
        "ppl_ratio": "ppl_ratio",
        "log_ppl_diff": "log_ppl_diff",
        "log_ppl_abs_diff": "log_ppl_abs_diff",
        "log_ppl_diff_max": "log_ppl_diff_max",
        "log_ppl_diff_min": "log_ppl_diff_min",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_seq",
    }
    for theirs, name in names.items():
        assert ours[f"mismatch/{name}"] == pytest.approx(GOLDEN["verl_other"]["offpolicy"][theirs], abs=1e-6), name
