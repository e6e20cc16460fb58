"""What must not matter, and what must: Hypothesis over shapes, masks, ratios and every method."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_fixtures import TOKEN_FIELDS, leaf, packed, random_batch, rows

from tracekit.objectives import LossBatch, Metrics, policy_loss, with_totals

WIDE = dict(seq_clip_ratio_high=0.2, neg_seq_clip_ratio_low=0.15, neg_seq_clip_ratio_high=0.3)
METHODS = {
    "grpo": dict(name="grpo"),
    "grpo dual": dict(name="grpo", clip_ratio_c=1.3),
    "ppo bypass": dict(name="ppo", bypass=True, advantage="grpo"),
    "dr_grpo": dict(name="dr_grpo", loss_max_length=16),
    "dapo": dict(name="dapo"),
    "gspo": dict(name="gspo", clip_ratio_low=0.1, clip_ratio_high=0.1),
    "cispo": dict(name="cispo"),
    "tbpo": dict(name="tbpo", **WIDE),
    "tbpo truncate": dict(name="tbpo", band_mode="truncate", mismatch_mode="truncate", **WIDE),
    "reinforce": dict(name="reinforce"),
    "reinforce sequence": dict(name="reinforce", ratio_level="sequence"),
    "minirl": dict(name="minirl", correction="tis"),
    "dppo_tv": dict(name="dppo_tv", tv_low=0.05, tv_high=0.05),
    "tis": dict(name="grpo", correction="tis", is_cap=1.1),
    "tis sequence": dict(name="grpo", correction="tis", is_level="sequence", is_cap=1.2),
    "mis": dict(name="grpo", correction="mis", is_cap=1.5),
    "mis geometric": dict(name="dapo", correction="mis", mis_mean="geometric", is_cap=1.2, is_low=0.8),
    "mis token": dict(name="grpo", correction="mis", mis_mean="geometric", mis_weight="token", is_cap=1.2, is_low=0.8),
    "icepop": dict(name="dapo", correction="icepop", icepop_low=0.8, icepop_high=1.3),
    "token rejection": dict(name="dapo", correction="token_rejection", reject_low=0.8, denominator="surviving"),
    "veto": dict(name="dapo", correction="token_rejection", reject_low=0, reject_high=9, veto_min=0.7),
    "sequence rejection": dict(name="grpo", correction="sequence_rejection", denominator="surviving", reject_low=0.9),
    "acrl": dict(name="grpo", correction="acrl", x_reference=0.04),
    "acrl group": dict(name="dapo", correction="acrl", y_level="group"),
    "acrl batch": dict(name="ppo", correction="acrl", y_level="batch", advantage="grpo", alpha_max=0.5),
    "qurl": dict(name="grpo", correction="qurl", is_cap=1.1),
    "opsm": dict(name="grpo", correction="opsm"),
    "opsm surviving": dict(name="grpo", correction="opsm", denominator="surviving"),
    "verl": dict(
        name="dapo",
        correction="verl",
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_max_k2",
        rollout_rs_threshold="0.2",
    ),
    "kl": dict(name="grpo", kl_coef=0.1),
    "entropy": dict(name="dapo", entropy_coef=0.01, kl_coef=0.1, kl_estimator="k2"),
    "positive": dict(name="grpo", positive_only=True),
    "score centering": dict(name="reinforce", correction="score_centering", sc_topk=3),
}
method = pytest.mark.parametrize("knobs", [pytest.param(v, id=k) for k, v in METHODS.items()])
seeds = st.integers(0, 10_000)
few = settings(max_examples=3, deadline=None)
quick = settings(max_examples=10, deadline=None)


def full_batch(knobs, seed, **kw) -> LossBatch:
    """A random batch with everything a method may ask for."""
    b = random_batch(seed=seed, dtype=torch.float64, **kw)
    g = torch.Generator().manual_seed(seed + 1)
    n, t = b.mask.shape
    if knobs.get("kl_coef"):
        b = b.with_(logp_ref=b.logp_old + 0.1 * torch.randn(n, t, generator=g, dtype=torch.float64))
    if knobs.get("entropy_coef"):
        b = b.with_(entropy=torch.rand(n, t, generator=g, dtype=torch.float64))
    if "sc_topk" in knobs:
        q, p = (torch.randn(n, t, 8, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
        q, index = q.topk(3, -1)
        b = b.with_(logp_mu_topk=q, logp_topk=leaf(p.gather(-1, index)))
    return b


def evaluate(knobs, parts, order=None):
    """Loss, gradients of all response tokens by response, and metrics, of a step made of `parts`."""
    objective = policy_loss(**knobs)
    objective.begin_batch(parts)
    parts = with_totals(parts, objective.totals(parts))
    loss, grads, metrics = 0.0, [], Metrics()
    for part in parts:
        out = objective(part)
        (grad,) = torch.autograd.grad(out.loss, part.logp)
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(out.coefficients, grad, atol=1e-12, rtol=1e-9)
        loss = loss + out.loss.detach()
        ids = part.segment_ids
        if ids is None:
            ids = torch.arange(part.mask.shape[0])[:, None].expand_as(part.mask)
        grads += [grad[part.mask & (ids == i)] for i in range(part.responses)]
        metrics.merge(out.metrics)
    if order is not None:
        grads = [grads[i] for i in order]
    return loss, torch.cat(grads), metrics.finalize()


def same(a, b):
    torch.testing.assert_close(a[0], b[0], atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(a[1], b[1], atol=1e-11, rtol=1e-9)
    assert a[2].keys() == b[2].keys()
    for name, value in a[2].items():
        assert value == pytest.approx(b[2][name], rel=1e-7, abs=1e-9), name


@method
@given(seed=seeds)
@few
def test_packing_padding_permuting_splitting_change_nothing(knobs, seed):
    check_layouts(knobs, seed)


@pytest.mark.long
@method
def test_layouts_many_seeds(knobs):
    for seed in range(60):
        check_layouts(knobs, seed)


def check_layouts(knobs, seed):
    b = full_batch(knobs, seed)
    whole = evaluate(knobs, [rows(b, slice(None))])
    same(evaluate(knobs, [packed(b)]), whole)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    same(evaluate(knobs, [rows(b, order)], order=torch.argsort(order)), whole)
    split = [rows(b, slice(0, 1)), packed(rows(b, slice(1, 4)), front=0), rows(b, slice(4, 6))]
    same(evaluate(knobs, split), whole)

    def widen(x):
        pad = x.new_full((x.shape[0], 3, *x.shape[2:]), False if x.dtype == torch.bool else float("nan"))
        return torch.cat([x.detach(), pad], 1)

    wide = b.with_(**{f: None if getattr(b, f) is None else widen(getattr(b, f)) for f in TOKEN_FIELDS})
    wide.logp = leaf(wide.logp)
    same(evaluate(knobs, [wide]), whole)


@method
@given(seed=seeds, bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
@few
def test_values_outside_the_mask_never_matter(knobs, seed, bad):
    b = full_batch(knobs, seed)
    whole = evaluate(knobs, [rows(b, slice(None))])
    spoil = {}
    for f in TOKEN_FIELDS:
        x = getattr(b, f)
        if x is not None and f != "mask":
            x = x.detach().clone()
            x[~b.mask] = bad
            spoil[f] = x
    spoiled = b.with_(**spoil)
    spoiled.logp = leaf(spoiled.logp)
    same(evaluate(knobs, [spoiled]), whole)


@method
@given(seed=seeds, bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
@few
def test_unusable_mu_is_dropped_and_counted(knobs, seed, bad):
    """Token methods behave as if the token were masked out, sequence methods as if its response were."""
    b = full_batch(knobs, seed)
    i = int(b.mask.sum(1).argmax())
    j = int(b.mask[i].sum()) // 2
    objective = policy_loss(**knobs)
    sequence = objective.loss.level == "sequence" or objective.correction.level == "sequence"
    mu, mask = b.logp_mu.clone(), b.mask.clone()
    mu[i, j] = bad
    mask[i, slice(None) if sequence else j] = False
    got, want = rows(b.with_(logp_mu=mu), slice(None)), rows(b.with_(mask=mask), slice(None))
    objective.begin_batch([want])
    a, c = objective(got), objective(want)
    torch.testing.assert_close(a.loss, c.loss)
    torch.testing.assert_close(a.coefficients, c.coefficients)
    (grad,) = torch.autograd.grad(a.loss, got.logp)
    torch.testing.assert_close(grad, a.coefficients, atol=1e-12, rtol=1e-9)
    assert a.metrics.finalize()["mismatch/mu_nonfinite_frac"] > 0
    assert int(a.nonfinite) == 0


@method
@given(seed=seeds, field=st.sampled_from(["logp", "logp_old", "advantages"]))
@few
def test_non_finite_learner_numbers_are_counted_and_leave_finite_gradients(knobs, seed, field):
    b = full_batch(knobs, seed)
    x = getattr(b, field).detach().clone()
    i, j = b.mask.nonzero()[0].tolist()
    x[i, j] = float("nan")
    b = rows(b.with_(**{field: x}), slice(None))
    objective = policy_loss(**knobs)
    objective.begin_batch([b])
    out = objective(b)
    (grad,) = torch.autograd.grad(out.loss, b.logp)
    assert int(out.nonfinite) == 1 and torch.isfinite(out.loss) and torch.isfinite(grad).all()
    assert out.metrics.finalize()["policy/nonfinite_tokens"] == 1
    with pytest.raises(Exception, match="non-finite"):
        policy_loss(**knobs | dict(nonfinite="raise"))(b)


@pytest.mark.parametrize(
    ("name", "field"), [("kl", "logp_ref"), ("entropy", "entropy"), ("score centering", "logp_topk")]
)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_non_finite_extras_of_the_learner_are_counted_too(name, field, bad):
    knobs = METHODS[name]
    b = full_batch(knobs, 1)
    x = getattr(b, field).detach().clone()
    i, j = b.mask.nonzero()[0].tolist()
    x[i, j] = bad
    b = b.with_(**{field: leaf(x)})
    b.logp = leaf(b.logp)
    out = policy_loss(**knobs)(b)
    (grad,) = torch.autograd.grad(out.loss, b.logp)
    assert int(out.nonfinite) == 1 and torch.isfinite(out.loss) and torch.isfinite(grad).all()


def test_fewer_top_tokens_than_k_are_a_smaller_head():
    knobs = METHODS["score centering"]
    b = full_batch(knobs, 1)
    q, p = b.logp_mu_topk.clone(), b.logp_topk.detach().clone()
    q[..., 2], p[..., 2] = float("-inf"), float("nan")
    out = policy_loss(**knobs)(b.with_(logp_mu_topk=q, logp_topk=leaf(p)))
    small = policy_loss(**knobs)(b.with_(logp_mu_topk=q[..., :2], logp_topk=leaf(p[..., :2])))
    assert int(out.nonfinite) == 0
    torch.testing.assert_close(out.loss, small.loss)
    torch.testing.assert_close(out.topk_coefficients[..., :2], small.topk_coefficients)
    assert torch.count_nonzero(out.topk_coefficients[..., 2]) == 0


@method
def test_only_logp_carries_gradient(knobs):
    b = full_batch(knobs, 5)
    for f in ("logp_old", "logp_mu", "advantages", "logp_ref", "logp_mu_topk"):
        if getattr(b, f) is not None:
            b = b.with_(**{f: getattr(b, f).detach().clone().requires_grad_()})
    objective = policy_loss(**knobs)
    objective.begin_batch([b])
    objective(b).loss.backward()
    assert torch.count_nonzero(b.logp.grad) > 0
    for f in ("logp_old", "logp_mu", "advantages", "logp_ref", "logp_mu_topk"):
        x = getattr(b, f)
        assert x is None or x.grad is None or torch.count_nonzero(x.grad) == 0, f


@method
@pytest.mark.parametrize("n", [0, 3])
def test_empty_batch_gives_zero_with_a_graph(knobs, n):
    b = full_batch(knobs, 0)
    b = rows(b.with_(mask=torch.zeros_like(b.mask)), slice(0, n))
    objective = policy_loss(**knobs)
    objective.begin_batch([full_batch(knobs, 0)])
    out = objective(b)
    (grad,) = torch.autograd.grad(out.loss, b.logp)
    assert float(out.loss.detach()) == 0 and torch.count_nonzero(grad) == 0
    assert out.metrics.finalize()["policy/all_rejected"] == 1


@given(seed=seeds)
@quick
def test_all_rejected_gives_an_exact_zero_with_a_graph(seed):
    for knobs in (
        dict(name="grpo", correction="token_rejection", reject_low=90.0, reject_high=91.0),
        dict(name="dapo", correction="icepop", icepop_low=90.0, icepop_high=91.0, denominator="surviving"),
        dict(name="tbpo", seq_tis_imp_ratio_cap=1e-6),
        dict(name="grpo", correction="mis", is_cap=1e-6),
    ):
        b = random_batch(seed=seed)
        out = policy_loss(**knobs)(b)
        (grad,) = torch.autograd.grad(out.loss, b.logp)
        assert float(out.loss.detach()) == 0 and torch.count_nonzero(grad) == 0
        values = out.metrics.finalize()
        assert values["policy/all_rejected"] == 1 and values["correction/response_drop_frac"] == 1


def outcome(batch, **knobs):
    objective = policy_loss(**knobs)
    objective.begin_batch([batch])
    out = objective(batch)
    return torch.cat([out.loss.detach().reshape(1), out.coefficients.reshape(-1)])


@given(seed=seeds)
@quick
def test_without_mismatch_every_correction_is_the_plain_loss(seed):
    b = random_batch(seed=seed, dtype=torch.float64)
    b = b.with_(logp_mu=b.logp_old)
    plain = outcome(b, name="grpo")
    for correction, more in {
        "tis": {},
        "mis": {},
        "icepop": {},
        "acrl": dict(x_reference=0.01),
        "qurl": {},
        "token_rejection": {},
        "sequence_rejection": {},
        "verl": dict(rollout_is="sequence"),
    }.items():
        torch.testing.assert_close(outcome(b, name="grpo", correction=correction, **more), plain)
    # X measured on such a batch is 0: weights of 1 and a warning, not a division.
    with pytest.warns(UserWarning, match="X = 0 is below"):
        torch.testing.assert_close(outcome(b, name="grpo", correction="acrl"), plain)


@given(seed=seeds)
@quick
def test_on_policy_methods_share_one_gradient(seed):
    """r = 1: GRPO, GSPO and TBPO (rho = 1) have the same gradient under seq-mean."""
    b = random_batch(seed=seed, dtype=torch.float64)
    b = b.with_(logp_old=b.logp.detach(), logp_mu=b.logp.detach())
    plain = outcome(b, name="grpo")[1:]
    torch.testing.assert_close(outcome(b, name="gspo")[1:], plain)
    torch.testing.assert_close(outcome(b, name="tbpo")[1:], plain)


@given(seed=seeds, gamma=st.floats(0.1, 2.0))
@quick
def test_acrl_with_y_equal_x_is_its_base_loss(seed, gamma):
    b = random_batch(seed=seed, dtype=torch.float64)
    for name, more in {"grpo": {}, "dapo": {}, "ppo": dict(advantage="grpo")}.items():
        measured = policy_loss(name, correction="acrl", gamma=gamma, y_level="batch", **more)
        measured.begin_batch([b])
        out = measured(b)
        torch.testing.assert_close(out.coefficients.reshape(-1), outcome(b, name=name, **more)[1:])
        assert out.metrics.finalize()["acrl/alpha_absmax"] == 0


@given(seed=seeds)
@quick
def test_tbpo_with_open_bands_is_unclipped_gspo(seed):
    b = random_batch(seed=seed, dtype=torch.float64)
    b = b.with_(logp_mu=b.logp_old)
    open_bands = dict(
        seq_clip_ratio_high=math.inf,
        neg_seq_clip_ratio_low=math.inf,
        neg_seq_clip_ratio_high=math.inf,
        seq_tis_imp_ratio_cap=math.inf,
    )
    for band in ("drop", "truncate"):
        got = outcome(b, name="tbpo", band_mode=band, **open_bands)
        torch.testing.assert_close(got, outcome(b, name="gspo", clip_ratio_low=1.0, clip_ratio_high=1e9))


@given(seed=seeds)
@quick
def test_gspo_band_rules(seed):
    """Outside the band in the direction of the advantage: no gradient; against it: the full one."""
    low, high = 0.05, 0.04
    b = random_batch(seed=seed, dtype=torch.float64)
    c = policy_loss("gspo", clip_ratio_low=low, clip_ratio_high=high)(b).coefficients
    free = policy_loss("gspo", clip_ratio_low=1.0, clip_ratio_high=1e9)(b).coefficients
    for i, row in enumerate(b.mask):
        if not row.any():
            continue
        s = float(torch.exp((b.logp.detach() - b.logp_old)[i, row].mean()))
        a = float(b.advantages[i, 0])
        stopped = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
        torch.testing.assert_close(c[i], torch.zeros_like(c[i]) if stopped else free[i])


@given(seed=seeds, shift=st.floats(-1.0, 1.0))
@quick
def test_scaling_rho(seed, shift):
    """rho times a constant: uncapped and geometric weights scale by it, products by its power, normalised ones not."""
    b = random_batch(seed=seed, dtype=torch.float64)
    moved = b.with_(logp_mu=b.logp_mu - shift)
    factor = math.exp(shift)
    big = dict(name="grpo", is_cap=1e9)
    tis = outcome(b, correction="tis", **big)
    torch.testing.assert_close(outcome(moved, correction="tis", **big), tis * factor)
    geo = outcome(b, correction="mis", mis_mean="geometric", **big)
    torch.testing.assert_close(outcome(moved, correction="mis", mis_mean="geometric", **big), geo * factor)
    torch.testing.assert_close(outcome(moved, name="grpo"), outcome(b, name="grpo"))
    normalised = dict(name="grpo", correction="verl", rollout_is="token", rollout_is_threshold=1e9)
    normalised["rollout_is_batch_normalize"] = True
    torch.testing.assert_close(outcome(moved, **normalised), outcome(b, **normalised))
    product = outcome(b, correction="mis", **big)[1:].reshape(b.mask.shape)
    power = torch.exp(shift * b.mask.sum(1, keepdim=True).double())
    torch.testing.assert_close(outcome(moved, correction="mis", **big)[1:].reshape(b.mask.shape), product * power)


@method
@given(seed=seeds)
@few
def test_bf16_equals_fp64_on_the_rounded_values(knobs, seed):
    b = full_batch(knobs, seed)
    rounded = {}
    for f in TOKEN_FIELDS:
        x = getattr(b, f)
        if x is not None and x.dtype != torch.bool:
            rounded[f] = x.detach().bfloat16()
    half = b.with_(**rounded | dict(logp=leaf(rounded["logp"])))
    exact = b.with_(**{f: x.double() for f, x in rounded.items()})
    exact = exact.with_(logp=leaf(exact.logp))
    objective = policy_loss(**knobs)
    objective.begin_batch([exact])
    low, high = objective(half), objective(exact)
    assert low.loss.dtype == torch.float32
    if knobs.get("correction") in ("mis", "icepop", "opsm", "verl") or knobs["name"] in ("tbpo", "gspo"):
        # A ratio within fp32 rounding of a bound may fall on either side of it.
        differs = (low.coefficients.double() - high.coefficients).abs() > 1e-5
        assert differs.any(-1).float().mean() <= 1 / 6
        return
    torch.testing.assert_close(low.loss.double(), high.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(low.coefficients.double(), high.coefficients, atol=1e-5, rtol=1e-4)
