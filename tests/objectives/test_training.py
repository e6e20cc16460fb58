"""A few steps of training with each method on a toy policy whose sampler is coarser than its learner."""

import pytest
import torch
from test_properties import METHODS

from tracekit.objectives import LossBatch, compute_advantages, policy_loss, with_totals

VOCAB, LENGTH, PROMPTS, GROUP, STEPS, MINI_STEPS = 8, 5, 8, 8, 12, 2
TARGET = torch.tensor([3, 1, 4, 1, 5])
TOY = {
    "tbpo": dict(seq_clip_ratio_high=0.3, neg_seq_clip_ratio_low=0.3, neg_seq_clip_ratio_high=0.3),
    "tbpo truncate": dict(seq_clip_ratio_high=0.3, neg_seq_clip_ratio_low=0.3, neg_seq_clip_ratio_high=0.3),
}


def expected_reward(logits):
    return float(logits.softmax(-1)[torch.arange(LENGTH), TARGET].mean())


def quantised(logits):
    """The sampler's view of the logits: rounded to quarters."""
    return (logits * 4).round() / 4


def train(knobs, lr=1.0, seed=0):
    """Expected reward before and after, and the smallest gradient norm seen."""
    g = torch.Generator().manual_seed(seed)
    logits = 0.3 * torch.randn(LENGTH, VOCAB, generator=g)
    reference = logits.clone()
    logits.requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=lr)
    objective = policy_loss(metric_level="basic", **knobs)
    n = PROMPTS * GROUP
    group = torch.arange(n) // GROUP
    start, norms = expected_reward(logits.detach()), []
    for _ in range(STEPS):
        sampler = quantised(logits.detach()).log_softmax(-1)
        tokens = torch.multinomial(sampler.exp(), n, replacement=True, generator=g).T
        rewards = (tokens == TARGET).float().mean(1)
        kind = "grpo" if objective.needs_values else objective.advantage
        advantages = compute_advantages(kind, rewards, group)
        top = sampler.topk(3, -1)

        def view(logp, tokens=tokens, sampler=sampler, advantages=advantages, top=top, **more):
            def at(x):
                return x.expand(n, LENGTH, VOCAB).gather(-1, tokens[..., None])[..., 0]

            extra = {}
            if objective.needs_topk:
                shape = (n, LENGTH, 3)
                extra["logp_mu_topk"] = top.values.expand(shape)
                extra["logp_topk"] = logp.gather(-1, top.indices).expand(shape)
            if objective.needs_ref:
                extra["logp_ref"] = at(reference.log_softmax(-1))
            if objective.needs_entropy:
                extra["entropy"] = -(logp.exp() * logp).sum(-1).expand(n, LENGTH)
            return LossBatch(
                logp=at(logp),
                logp_mu=at(sampler),
                advantages=advantages[:, None].expand(n, LENGTH),
                mask=torch.ones(n, LENGTH, dtype=torch.bool),
                group=group,
                **extra,
                **more,
            )

        with torch.no_grad():
            old = view(logits.log_softmax(-1), logp_old=torch.zeros(n, LENGTH)).logp
        for mini_step in range(MINI_STEPS):
            batch = view(logits.log_softmax(-1), logp_old=old)
            if mini_step == 0:
                objective.begin_batch([batch])
            (batch,) = with_totals([batch], objective.totals([batch]))
            out = objective(batch)
            optimizer.zero_grad()
            out.loss.backward()
            assert torch.isfinite(logits.grad).all() and int(out.nonfinite) == 0
            norms.append(float(logits.grad.norm()))
            optimizer.step()
    return start, expected_reward(logits.detach()), norms


@pytest.mark.parametrize("name", METHODS)
def test_reward_rises(name):
    knobs = {k: v for k, v in METHODS[name].items() if k != "loss_max_length"} | TOY.get(name, {})
    if METHODS[name]["name"] == "dr_grpo":
        knobs["loss_max_length"] = LENGTH
    # Without the division by the group's standard deviation (about 1/7 here) a step is that much shorter.
    start, end, norms = train(knobs, lr=7.0 if knobs["name"] == "dr_grpo" else 1.0)
    assert sum(x > 0 for x in norms) > STEPS, "most mini-steps had no gradient"
    # Two standard errors of the mean reward of one batch.
    error = 2 * (start * (1 - start) / (PROMPTS * GROUP * LENGTH)) ** 0.5
    assert end > start + error, (start, end)
