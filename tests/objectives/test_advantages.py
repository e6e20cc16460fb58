"""Advantages, GAE, value loss and DAPO's filters."""

import pytest
import torch

from tracekit.errors import ConfigError, DataError
from tracekit.objectives import LossBatch, compute_advantages, group_advantages
from tracekit.objectives.advantages import reinforce_pp_advantages, rloo_advantages
from tracekit.objectives.filters import DynamicSampling, informative_groups, overlong_mask, overlong_penalty
from tracekit.objectives.gae import Moments, gae, token_rewards, value_loss, whiten

R, G = torch.tensor([1.0, 0, 0, 1, 1]), torch.tensor([4, 4, 4, 4, 4])


@pytest.mark.parametrize(
    ("std", "high", "low"), [("bessel", 0.7303, -1.09544), ("population", 0.81649, -1.22474), ("none", 0.4, -0.6)]
)
def test_group_advantages(std, high, low):
    assert group_advantages(R, G, std).tolist() == pytest.approx([high, low, low, high, high], abs=1e-5)


def test_groups_do_not_mix_and_order_does_not_matter():
    rewards, group = torch.tensor([1.0, 5.0, 0.0, 3.0]), torch.tensor([9, 2, 9, 2])
    got = group_advantages(rewards, group, "none")
    assert got.tolist() == [0.5, 1.0, -0.5, -1.0]
    order = torch.tensor([3, 0, 2, 1])
    torch.testing.assert_close(group_advantages(rewards[order], group[order], "none"), got[order])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_equal_rewards_give_exact_zero(kind, value):
    got = compute_advantages(kind, torch.full((7,), value), torch.zeros(7, dtype=torch.long))
    assert got.tolist() == [0.0] * 7


def test_rloo_is_the_mean_of_the_others():
    expected = [float(R[i] - (R.sum() - R[i]) / 4) for i in range(5)]
    assert rloo_advantages(R, G).tolist() == pytest.approx(expected)


def test_reinforce_pp_normalises_over_the_batch():
    rewards, group = torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1])
    got = reinforce_pp_advantages(rewards, baseline="none")
    torch.testing.assert_close(got.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(got.std(unbiased=False), torch.tensor(1.0))
    grouped = reinforce_pp_advantages(rewards, group)
    assert (grouped / grouped[0]).tolist() == pytest.approx([1, -1, 2, -2])


def test_refusals():
    with pytest.raises(ConfigError, match="single response"):
        group_advantages(torch.ones(3), torch.tensor([0, 0, 1]))
    with pytest.raises(ConfigError, match="bessel"):
        group_advantages(R, G, "sample")
    with pytest.raises(ConfigError, match="critic-free"):
        compute_advantages("gae", R, G)


@pytest.mark.parametrize(
    ("lam", "adv", "returns"),
    [(1.0, (0.8, 0.6, 0.3), (1, 1, 1)), (0.95, (0.75575, 0.585, 0.3), (0.95575, 0.985, 1.0))],
)
def test_gae_vectors(lam, adv, returns):
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([1.0]), mask)
    a, g = gae(rewards, torch.tensor([[0.2, 0.4, 0.7]]), mask, gamma=1.0, lam=lam)
    assert a[0].tolist() == pytest.approx(adv) and g[0].tolist() == pytest.approx(returns)


def test_gae_skips_tool_tokens_as_if_they_were_not_there():
    nan = float("nan")
    mask = torch.tensor([[True, False, False, True, True, False]])
    values = torch.tensor([[0.2, nan, nan, 0.4, 0.7, nan]])
    rewards = token_rewards(torch.tensor([1.0]), mask)
    assert rewards.tolist() == [[0, 0, 0, 0, 1, 0]]
    a, g = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dense = torch.ones(1, 3, dtype=torch.bool)
    a2, g2 = gae(token_rewards(torch.tensor([1.0]), dense), values[mask][None], dense, gamma=0.9, lam=0.8)
    torch.testing.assert_close(a[mask], a2[0])
    torch.testing.assert_close(g[mask], g2[0])
    assert torch.count_nonzero(a[~mask]) == 0
    ids = torch.tensor([-1, 0, 0, 1, 1, 1])
    packed_mask = torch.tensor([True, True, True, True, False, True])
    a3, _ = gae(torch.ones(6), torch.zeros(6), packed_mask, ids, 2, gamma=1.0, lam=1.0)
    assert a3.tolist() == [0, 2, 1, 2, 0, 1]


def test_token_rewards_with_kl():
    mask = torch.tensor([[True, True], [False, False]])
    got = token_rewards(torch.tensor([1.0, 3.0]), mask, kl=torch.tensor([[0.5, 1.0], [9.0, 9.0]]), kl_coef=0.1)
    assert got.flatten().tolist() == pytest.approx([-0.05, 0.9, 0, 0])


def test_whiten():
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(4, 5, generator=g), torch.rand(4, 5, generator=g) > 0.3
    halves = Moments.of(x[:2], mask[:2]) + Moments.of(x[2:], mask[2:])
    got = whiten(x, mask, halves)
    assert float(got[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(got[mask].std(unbiased=False)) == pytest.approx(1, abs=1e-5)
    one = torch.zeros(4, 5, dtype=torch.bool)
    one[1, 1] = True
    assert whiten(x, one, Moments.of(x, one))[1, 1] == x[1, 1]


def test_value_loss_splits_and_clips():
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(4, 6, generator=g) > 0.2
    values, old, target = (torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(3))
    values[~mask] = float("nan")

    def part(i, totals=None):
        return LossBatch(
            logp=None,
            logp_old=old[i],
            logp_mu=old[i],
            advantages=old[i],
            mask=mask[i],
            values=values[i].clone().requires_grad_(),
            values_old=old[i],
            returns=target[i],
        )

    from tracekit.objectives import StepTotals

    totals = StepTotals(tokens=float(mask.sum()), sequences=4.0)
    whole = part(slice(None))
    out = value_loss(whole, clip=0.3)
    out.loss.backward()
    torch.testing.assert_close(whole.values.grad, out.coefficients)
    parts = [value_loss(part(slice(i, i + 2)), clip=0.3, totals=totals) for i in (0, 2)]
    torch.testing.assert_close(sum(p.loss for p in parts), out.loss)
    merged = parts[0].metrics.merge(parts[1].metrics).finalize()
    assert merged == pytest.approx(out.metrics.finalize())
    v, t = values[mask], target[mask]
    assert merged["critic/explained_variance"] == pytest.approx(
        float(1 - (t - v).var(unbiased=False) / t.var(unbiased=False))
    )
    with pytest.raises(DataError, match="values_old"):
        value_loss(whole.with_(values_old=None), clip=0.3)


def test_dynamic_sampling():
    accuracy, group = torch.tensor([1.0, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert informative_groups(accuracy, group).tolist() == [False, False, True, True, False, False]
    sampling = DynamicSampling(prompts=2, max_rounds=3)
    sampling.add(accuracy, group)
    assert not sampling.full and sampling.dropped_frac == pytest.approx(2 / 3)
    sampling.add(accuracy, group + 10)
    assert sampling.full
    short = DynamicSampling(prompts=9, max_rounds=2)
    short.add(accuracy, group)
    with pytest.raises(DataError, match="2 of 9 prompts"):
        short.add(accuracy, group)


def test_overlong():
    lengths = torch.tensor([100, 16384, 18432, 20480])
    assert overlong_penalty(lengths, max_length=20480, buffer=4096).tolist() == pytest.approx([0, 0, -0.5, -1])
    with pytest.raises(ConfigError):
        overlong_penalty(lengths, max_length=10, buffer=11)
    mask, cut = torch.ones(2, 3, dtype=torch.bool), torch.tensor([False, True])
    assert overlong_mask(mask, cut).sum(1).tolist() == [3, 0]
    assert overlong_mask(torch.ones(4).bool(), cut, torch.tensor([-1, 0, 1, 1])).tolist() == [True, True, False, False]
