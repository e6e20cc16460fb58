"""Each correction's own rules: bands, caps, special cases, long responses."""

import math

import pytest
import torch
from objective_fixtures import f1, leaf, random_batch, rows

from tracekit.errors import DataError
from tracekit.objectives import LossBatch, policy_loss
from tracekit.objectives.losses.error_tokens import error_tokens
from tracekit.objectives.losses.tbpo_advice import suggest_bands
from tracekit.objectives.presets import VERL_PRESETS
from tracekit.objectives.terms import Terms


def tokens(rho, adv=1.0, r=1.0, length=None) -> LossBatch:
    """Responses [N, T] with the given mismatch ratios (list of lists) at probability .05."""
    lam = torch.tensor(rho, dtype=torch.float64).log()
    n, t = lam.shape
    old = torch.full((n, t), math.log(0.05), dtype=torch.float64)
    return LossBatch(
        logp=leaf(old + math.log(r)),
        logp_old=old,
        logp_mu=old - lam,
        advantages=torch.as_tensor(adv, dtype=torch.float64).reshape(-1, 1).expand(n, t),
        mask=torch.ones(n, t, dtype=torch.bool),
        group=torch.zeros(n, dtype=torch.long),
    )


def weights(batch, **knobs):
    """u of each token: the coefficients over those of the uncorrected loss."""
    objective = policy_loss(**{"name": "dapo", **knobs})
    objective.begin_batch([batch])
    return objective(batch).coefficients / policy_loss("dapo")(batch).coefficients


def test_mis_vanishes_on_a_long_response_and_stays_finite():
    long = tokens([[math.exp(-0.0345)] * 1000])
    assert 0 < float(weights(long, correction="mis").max()) < 1e-8
    geo = weights(long, correction="mis", mis_mean="geometric")
    assert geo.flatten().tolist() == pytest.approx([math.exp(-0.0345)] * 1000)


def test_mis_drops_a_product_beyond_every_float():
    huge = tokens([[math.exp(0.1)] * 1000, [1.0] * 1000], adv=[1.0, 1.0])
    got = weights(huge, correction="mis", is_cap=1e12)
    assert torch.count_nonzero(got[0]) == 0 and got[1].tolist() == pytest.approx([1.0] * 1000)


def test_bands():
    edge = tokens([[0.5001, 4.9999, 0.4999, 5.0001]])
    assert weights(edge, correction="icepop").flatten().tolist() == pytest.approx([0.5001, 4.9999, 0, 0])
    assert weights(edge, correction="icepop", icepop_inside="one").flatten().tolist() == pytest.approx([1, 1, 0, 0])
    assert weights(edge, correction="token_rejection").flatten().tolist() == pytest.approx([1, 1, 0, 0])


def test_verl_k1_band_is_inverted():
    band = dict(rollout_rs="token_k1", rollout_rs_threshold="0.5_5.0")
    got = weights(tokens([[0.21, 0.19, 1.9, 2.1]]), correction="verl", **band)
    assert got.flatten().tolist() == pytest.approx([1, 0, 1, 0])


@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_every_preset_runs(preset):
    name = VERL_PRESETS[preset].get("name", "ppo")
    b = random_batch(seed=1)
    out = policy_loss(name, correction=f"verl:{preset}", advantage="grpo")(b)
    (grad,) = torch.autograd.grad(out.loss, b.logp)
    torch.testing.assert_close(grad, out.coefficients, atol=1e-6, rtol=1e-5)


def test_veto_drops_the_whole_response():
    got = weights(tokens([[1.0, 1e-5], [1.0, 0.6]], adv=[1.0, 1.0]), correction="token_rejection", veto_min=1e-4)
    assert got.flatten().tolist() == pytest.approx([0, 0, 1, 1])


def test_qurl_widens_the_upper_clip_by_the_cut():
    """rho 4, cap 2, eps .2: m = .5, upper bound 2.4."""
    for r, moving in ((2.39, True), (2.41, False)):
        c = policy_loss("grpo", correction="qurl", is_cap=2.0)(tokens([[4.0]], r=r)).coefficients
        assert float(c) == pytest.approx(-2.0 * r if moving else 0.0)
    for r in (0.5, 1.1, 1.3):
        b = tokens([[0.3, 1.0, 1.9]], r=r)
        a, c = (policy_loss("grpo", correction=k, is_cap=2.0)(b).coefficients for k in ("qurl", "tis"))
        torch.testing.assert_close(a, c)


def test_opsm_keeps_positive_and_close_responses():
    b = tokens([[1.0], [1.0], [1.0]], adv=[1.0, -1.0, -1.0])
    b.logp = leaf(b.logp_old + torch.tensor([[-0.5], [-0.5], [0.5]]))
    got = policy_loss("dapo", correction="opsm", clip_ratio_low=1.0)(b).coefficients
    assert (got != 0).flatten().tolist() == [True, False, True]


# ACRL ------------------------------------------------------------------------------------------------------------

QUADRANTS = [  # advantage, rho, weight above 1 if Y > X, above 1 if Y < X
    (1.0, 0.8, True, False),
    (1.0, 1.25, False, True),
    (-1.0, 1.25, True, False),
    (-1.0, 0.8, False, True),
]


@pytest.mark.parametrize(("adv", "rho", "above", "below"), QUADRANTS)
def test_acrl_sign_table(adv, rho, above, below):
    b = tokens([[rho]], adv=[adv])
    y = abs(0.05 - 0.05 / rho)
    knobs = dict(correction="acrl", gamma=0.5)
    for x, enhances in ((y / 2, above), (y * 2, below)):
        u = float(weights(b, x_reference=x, **knobs))
        assert (u > 1) == enhances and u != 1
        assert u == pytest.approx(rho ** (0.5 * adv * (1 - y / x)))
    assert float(weights(b, x_reference=y, **knobs)) == pytest.approx(1.0, abs=1e-12)


def test_acrl_variants():
    b = tokens([[0.8, 0.8], [1.25, 1.0]], adv=[1.0, -1.0])
    gaps = [[abs(0.05 - 0.05 / r) for r in row] for row in ([0.8, 0.8], [1.25, 1.0])]
    y = [sum(g) / 2 for g in gaps]
    x = 0.008
    assert y[1] < x < y[0]
    alpha = [0.65 * s * (1 - v / x) for s, v in zip((1, -1), y, strict=True)]

    def expected(a, b_):
        return [0.8**a, 0.8**a, 1.25**b_, 1.0]

    def u(variant, **more):
        return weights(b, correction="acrl", x_reference=x, acrl_variant=variant, **more).flatten().tolist()

    assert u("full") == pytest.approx(expected(*alpha))
    assert u("full", alpha_max=0.1) == pytest.approx(expected(*(max(-0.1, min(0.1, a)) for a in alpha)))
    assert u("fallback") == pytest.approx(expected(alpha[0], 0))
    assert u("reverse") == pytest.approx(expected(0, alpha[1]))
    assert u("continuous", acrl_alpha=3.0) == pytest.approx(expected(-3.0, 3.0))
    assert u("const", acrl_alpha=1.0) == pytest.approx([0.8, 0.8, 1.25, 1.0])
    assert u("measure") == pytest.approx([1.0] * 4)


def test_acrl_alpha_one_is_tis():
    b = random_batch(seed=2, dtype=torch.float64)
    const = policy_loss("grpo", correction="acrl", acrl_variant="const", acrl_alpha=1.0, is_cap=3.0)(b).coefficients
    torch.testing.assert_close(const, policy_loss("grpo", correction="tis", is_cap=3.0)(b).coefficients)


def test_acrl_levels_coincide_for_one_response():
    b = tokens([[0.8, 1.1, 0.5]], adv=[1.0])
    got = [weights(b, correction="acrl", x_reference=0.01, y_level=level) for level in ("sequence", "group", "batch")]
    torch.testing.assert_close(got[0], got[1])
    torch.testing.assert_close(got[0], got[2])


def test_acrl_needs_its_measurements():
    with pytest.raises(DataError, match="begin_batch"):
        policy_loss("grpo", correction="acrl")(f1())
    with pytest.raises(DataError, match="begin_batch"):
        policy_loss("grpo", correction="acrl", x_reference=0.1, y_level="group")(f1())


def test_x_is_measured_once_and_survives_a_checkpoint():
    objective = policy_loss("grpo", correction="acrl")
    objective.begin_batch([f1()])
    assert objective.state.x == pytest.approx(0.0616667, abs=1e-6)
    assert objective.state_dict() == {"x": objective.state.x, "x_source": "step0", "x_responses": 2}
    other = random_batch(seed=9)
    objective.begin_batch([other])
    resumed = policy_loss("grpo", correction="acrl")
    resumed.load_state_dict(objective.state_dict())
    resumed.begin_batch([other])
    assert resumed.state.x == objective.state.x == pytest.approx(0.0616667, abs=1e-6)
    torch.testing.assert_close(objective(other).coefficients, resumed(other).coefficients)
    given = policy_loss("grpo", correction="acrl", x_reference=0.02)
    given.begin_batch([f1()])
    assert given.state_dict()["x"] == 0.02
    with pytest.raises(DataError, match="lacks"):
        resumed.load_state_dict({"x": 1.0})


def test_x_comes_from_the_unfiltered_responses():
    objective = policy_loss("grpo", correction="acrl")
    objective.begin_batch([rows(f1(), slice(0, 1))], reference=[f1()])
    assert objective.state.x == pytest.approx(0.0616667, abs=1e-6)
    assert objective.state.x_source == "reference" and objective.state.batch_y == pytest.approx(0.0333333, abs=1e-6)


def test_every_run_logs_y_and_x():
    objective = policy_loss("grpo", correction="tis")
    objective.begin_batch([f1()])
    values = objective(f1()).metrics.finalize()
    assert values["acrl/Y_mean"] == pytest.approx(values["acrl/X"], abs=1e-6)
    assert values["acrl/frac_Y_gt_X"] == 0.5


def test_acrl_weight_is_capped():
    b = tokens([[1e-6]], adv=[1.0])
    got = weights(b, correction="acrl", x_reference=1e-3, is_cap=3.0)
    assert float(got) == pytest.approx(3.0)


# Score Centering -------------------------------------------------------------------------------------------------

Q = torch.tensor([0.5, 0.25, 0.2, 0.05], dtype=torch.float64)
P = torch.tensor([0.4, 0.4, 0.15, 0.05], dtype=torch.float64)


def logit_gradient(token, q, p, k, level, cap):
    """Gradient on the logits for one sampled token, with the sampler's k most likely as head."""
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(-1)
    top = q.topk(k).indices
    one = torch.ones(1, 1, dtype=torch.float64)
    b = LossBatch(
        logp=logp[token].reshape(1, 1),
        logp_old=p.log()[token].reshape(1, 1),
        logp_mu=q.log()[token].reshape(1, 1),
        advantages=one,
        mask=one.bool(),
        logp_topk=logp[top].reshape(1, 1, k),
        logp_mu_topk=q.log()[top].reshape(1, 1, k),
    )
    objective = policy_loss("reinforce", correction="score_centering", sc_topk=k, ratio_level=level, ratio_cap=cap)
    (grad,) = torch.autograd.grad(objective(b).loss, logits)
    return grad


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [("token", 2.0, (-0.48, 0.32, 0.12, 0.04)), ("token", 1.2, (-0.44, 0.26, 0.135, 0.045))],
)
def test_score_centering_fixture(level, cap, expected):
    assert logit_gradient(0, Q, P, 4, level, cap).tolist() == pytest.approx(expected, abs=1e-6)


def test_score_centering_tail_error():
    mean = sum(Q[a] * logit_gradient(a, Q, P, 2, "none", 2.0) for a in range(4))
    assert mean.tolist() == pytest.approx([0, 0, -0.0125, 0.0125], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("level", "cap"), [("token", 2.0), ("token", 1.1), ("none", 1.0)])
def test_centred_score_has_zero_mean_under_the_sampler(seed, level, cap):
    g = torch.Generator().manual_seed(seed)
    q, p = (torch.randn(7, generator=g, dtype=torch.float64).softmax(-1) for _ in range(2))
    mean = sum(q[a] * logit_gradient(a, q, p, 7, level, cap) for a in range(7))
    assert float(mean.abs().max()) < 1e-6
    plain = [policy_loss("reinforce", ratio_level=level, ratio_cap=cap) for _ in range(1)][0]
    assert plain.needs_topk == 0


def test_uncapped_total_ratio_is_unbiased():
    """Expectation under mu of the REINFORCE token gradient equals the on-policy one, by enumeration."""
    reward = torch.tensor([1.0, -0.5, 0.3, 2.0], dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for a in range(4):
        logits = P.log().requires_grad_()
        logp = logits.log_softmax(-1)[a].reshape(1, 1)
        mu = Q.log()[a].reshape(1, 1)
        b = LossBatch(logp=logp, logp_old=mu, logp_mu=mu, advantages=reward[a].reshape(1, 1), mask=mu < 0)
        (grad,) = torch.autograd.grad(policy_loss("reinforce", ratio_cap=math.inf)(b).loss, logits)
        total += Q[a] * grad
    logits = P.log().requires_grad_()
    (expected,) = torch.autograd.grad(-(logits.softmax(-1) * reward).sum(), logits)
    torch.testing.assert_close(total, expected)


# TBPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adv", "edge", "side"), [(1.0, 4e-4, "high"), (-1.0, -3e-4, "low"), (-1.0, 7e-4, "high")])
def test_tbpo_band_edges(adv, edge, side):
    """Just inside stays, just outside leaves; the positive side has no lower bound."""
    outward = 1 if side == "high" else -1
    for step, kept in ((-1e-9, True), (1e-9, False)):
        b = tokens([[1.0, 1.0, 1.0]], adv=[adv])
        b.logp = leaf(b.logp_old + math.log(1 + edge + outward * step))
        assert bool((policy_loss("tbpo")(b).coefficients != 0).all()) == kept
    b = tokens([[1.0]], adv=[1.0])
    b.logp = leaf(b.logp_old - 2.0)
    assert float(policy_loss("tbpo")(b).coefficients) != 0


def test_tbpo_first_mini_step_keeps_everything():
    b = random_batch(seed=3)
    b.logp = leaf(b.logp_old)
    values = policy_loss("tbpo")(b).metrics.finalize()
    assert values["tbpo/dropped_frac"] == 0 and values["tbpo/seq_ratio_max"] == 1.0
    zero = b.with_(advantages=torch.zeros_like(b.advantages))
    assert torch.count_nonzero(policy_loss("tbpo")(zero).coefficients) == 0


def test_tbpo_advice_names_bands_that_work():
    b = random_batch(n=60, seed=4, spread=0.1, dtype=torch.float64)
    objective = policy_loss("tbpo")
    out = objective(b)
    dropped = out.metrics.finalize()["tbpo/dropped_frac"]
    assert dropped < 0.9 and objective.advice(out.metrics, 1) is None
    tight = policy_loss("tbpo", seq_clip_ratio_high=0.0, neg_seq_clip_ratio_low=0.0, neg_seq_clip_ratio_high=0.0)
    b = b.with_(advantages=-b.advantages.abs())
    out = tight(b)
    assert out.metrics.finalize()["tbpo/dropped_frac"] > 0.9
    text = tight.advice(out.metrics, 1)
    assert text.count("\n") <= 2 and "quantiles" in text and "neg_seq_clip_ratio_low=" in text
    bands = suggest_bands(out.metrics, keep=0.8)
    kept = 1 - policy_loss("tbpo", **bands)(b).metrics.finalize()["tbpo/dropped_frac"]
    assert kept == pytest.approx(0.8, abs=0.05)
    assert "same path" in tight.advice(out.metrics, 0)


def test_error_tokens_need_low_probability_a_cluster_and_a_negative_response():
    n = 40
    prob = torch.full((3, n), 0.8, dtype=torch.float64)
    prob[0, 10:16] = 0.01  # a cluster in a negative response
    prob[0, 30] = 0.01  # alone
    prob[1, 10:16] = 0.01  # a cluster in a positive response
    prob[2, ::16] = 0.01  # far apart in a negative response
    old = prob.log()
    b = LossBatch(
        logp=leaf(old),
        logp_old=old,
        logp_mu=old,
        advantages=torch.tensor([[-1.0], [1.0], [-1.0]]).expand(3, n).double(),
        mask=torch.ones(3, n, dtype=torch.bool),
    )
    found = error_tokens(Terms.build(b, whole_responses=False), probability=0.05, window=16, cluster=4)
    assert found.reshape(3, n).nonzero().tolist() == [[0, i] for i in range(10, 16)]
    share = policy_loss("tbpo")(b).metrics.finalize()["tbpo/error_token_frac"]
    assert share == pytest.approx(6 / 120)
    b.logp = leaf(torch.zeros_like(old))  # the current policy no longer finds them unlikely
    assert policy_loss("tbpo")(b).metrics.finalize()["tbpo/error_token_frac"] == 0
