"""Numbers of the metrics on F1, histograms, position buckets, version splits."""

import pytest
import torch
from objective_fixtures import f1, random_batch, rows

from tracekit.objectives import Metrics, policy_loss

EXPECTED = {
    "kl_k1": 0.253702,
    "kl_k2": 0.270098,
    "kl_k3": 0.173702,
    "exp_abs_diff_mean": 1.922222,
    "logprob_abs_diff_mean": 0.432217,
    "logprob_abs_diff_max": 1.609438,
    "logprob_diff_max": 0.223144,
    "logprob_diff_min": -1.609438,
    "chi2_token": -0.005,
    "chi2_seq": -0.335938,
    "ess": 0.850653,
    "ppl_train": 6.072766,
    "ppl_rollout": 3.615722,
    "ppl_ratio": 1.480750,
    "log_ppl_diff": 0.326943,
    "prob_diff_mean": 0.056,
    "prob_diff_max": 0.10,
    "prob_diff_std": 0.037815,
    "seq_prob_diff_mean": 0.061667,
}


def test_mismatch_on_the_fixture():
    for knobs in (dict(name="grpo"), dict(name="ppo", bypass=True, advantage="grpo"), dict(name="reinforce")):
        got = policy_loss(**knobs)(f1()).metrics.finalize()
        for name, value in EXPECTED.items():
            assert got[f"mismatch/{name}"] == pytest.approx(value, abs=1e-6), name


def test_pearson():
    b = f1()
    p, q = b.logp_old[b.mask].exp(), b.logp_mu[b.mask].exp()
    got = policy_loss("grpo")(b).metrics.finalize()["mismatch/pearson"]
    assert got == pytest.approx(float(torch.corrcoef(torch.stack([p, q]))[0, 1]), abs=1e-6)


def test_position_buckets():
    b = random_batch(n=2, length=100, seed=1, dtype=torch.float64)
    b = b.with_(mask=torch.ones(2, 100, dtype=torch.bool))
    got = policy_loss("grpo")(b).metrics.finalize()
    gap = (b.logp_old - b.logp_mu).abs()
    for name, where in (("0-15", slice(0, 16)), ("16-63", slice(16, 64)), ("64-255", slice(64, 100))):
        key = f"mismatch/by_position/{name}/logprob_abs_diff_mean"
        assert got[key] == pytest.approx(float(gap[:, where].mean()))
    assert "mismatch/by_position/256-1023/kl_k3" not in got


def test_position_counts_sampled_tokens_not_columns():
    b = random_batch(n=2, length=40, seed=1)
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, 20:36] = True  # a prompt in front, 16 sampled tokens
    got = policy_loss("grpo")(b.with_(mask=mask)).metrics.finalize()
    assert "mismatch/by_position/16-63/kl_k3" not in got


def test_version_split():
    b = random_batch(seed=2, dtype=torch.float64).with_(version_lag=torch.tensor([0, 0, 1, 0, 2, 0]))
    got = policy_loss("grpo")(b).metrics.finalize()
    gap = (b.logp_old - b.logp_mu).abs()
    for name, which in (("on_policy", [0, 1, 3, 5]), ("stale", [2, 4])):
        expected = gap[which][b.mask[which]].mean()
        assert got[f"mismatch/{name}/logprob_abs_diff_mean"] == pytest.approx(float(expected))


def test_clip_shares_sign_aware_and_any_sign():
    got = policy_loss("grpo")(f1()).metrics.finalize()
    # r = 1.333, 1.04, .978 | 2.5, .9: one positive above 1.2; 2.5 is out of the band but not clipped.
    assert got["policy/clip_frac"] == pytest.approx(0.2) and got["policy/clip_frac_high"] == pytest.approx(0.2)
    assert got["policy/ratio_out_of_band_frac"] == pytest.approx(0.4)
    assert policy_loss("grpo", clip_ratio_c=2.0)(f1()).metrics.finalize()["policy/clip_frac_dual"] == pytest.approx(0.2)


def test_raw_weights_are_reported_beside_capped_ones():
    got = policy_loss("grpo", correction="tis", is_cap=1.1)(f1()).metrics.finalize()
    assert got["correction/weight_raw_max"] == pytest.approx(1.25) and got["correction/weight_max"] == pytest.approx(
        1.1
    )
    assert got["correction/clip_frac"] == pytest.approx(0.4)


def test_histograms_count_every_token_and_add():
    objective = policy_loss("grpo", correction="tis")
    b = random_batch(seed=3)
    whole = objective(b).metrics.histograms()
    parts = [objective(rows(b, slice(0, 2))).metrics, objective(rows(b, slice(2, 6))).metrics]
    assert Metrics().merge(parts[0]).merge(parts[1]).histograms() == whole
    tokens = int(b.mask.sum())
    assert sum(whole["hist/ratio"]["counts"]) == sum(whole["hist/mismatch_ratio"]["counts"]) == tokens
    assert whole["hist/ratio"]["lines"] == [0.8, 1.2] and whole["hist/mismatch_ratio"]["lines"] == [5.0]
    both = [whole[f"hist/ratio_by_old_prob_{s}"]["counts"] for s in ("positive", "negative")]
    assert sum(map(sum, both[0])) + sum(map(sum, both[1])) == tokens
    assert len(both[0]) == len(whole["hist/ratio_by_old_prob_positive"]["row_edges"]) + 1


def test_histogram_puts_the_papers_tokens_where_its_figure_has_them():
    """.02 → .05 is r = 2.5 at low old probability, in the negative response."""
    h = policy_loss("grpo")(f1()).metrics.histograms()["hist/ratio_by_old_prob_negative"]
    row = sum(e <= 0.02 for e in h["row_edges"])
    column = sum(e <= 2.5 for e in h["edges"])
    assert h["counts"][row][column] == 1


def test_basic_level_leaves_the_details_out():
    out = policy_loss("grpo", metric_level="basic")(f1()).metrics
    assert not out.histograms() and not any("by_position" in k for k in out.finalize())
    assert out.finalize()["mismatch/kl_k1"] == pytest.approx(EXPECTED["kl_k1"], abs=1e-6)


def test_acrl_quadrants():
    objective = policy_loss("grpo", correction="acrl", x_reference=0.05)
    got = objective(f1()).metrics.finalize()
    # response 1: rho .9, 1.25, 1; response 2: .2, 1.25
    assert [got[f"acrl/quadrant_{i}_frac"] for i in (1, 2, 3, 4)] == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert got["acrl/X"] == pytest.approx(0.05) and got["acrl/Y_over_X_mean"] == pytest.approx(
        0.061667 / 0.05, abs=1e-4
    )
