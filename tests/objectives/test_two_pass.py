"""Chunked backward against the whole one: every row of F1 and random logits, with context parallelism's gather."""

import pytest
import torch
from objective_fixtures import f1, packed, random_batch
from test_fixture_f1 import row
from test_properties import METHODS, full_batch

from tracekit.objectives import policy_loss
from tracekit.objectives.two_pass import LogProbs, two_pass_backward


@row
@pytest.mark.parametrize("chunks", [1, 3])
def test_fixture_in_pieces(knobs, loss, grad, chunks):
    batch = packed(f1(), fill=0.0)
    objective = policy_loss(**knobs)
    objective.begin_batch([batch])
    logits = batch.logp.detach().clone().requires_grad_()
    pieces = [slice(int(i[0]), int(i[-1]) + 1) for i in torch.arange(logits.numel()).chunk(chunks)]
    out = two_pass_backward(objective, batch, pieces, lambda piece: LogProbs(logp=logits[piece]))
    assert float(out.loss) == pytest.approx(loss, abs=1e-5)
    where = batch.mask & (batch.segment_ids >= 0)
    assert logits.grad[where].tolist() == pytest.approx(grad, abs=1e-5)
    assert not out.loss.requires_grad


def head(batch, k=0, seed=0):
    """A linear head over a vocabulary of 8 that scores the batch's tokens: weights, and logits → LogProbs."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch.mask.numel(), 5, generator=g, dtype=torch.float64)
    weight = torch.randn(5, 8, generator=g, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 8, (batch.mask.numel(),), generator=g)
    top = torch.stack([torch.randperm(8, generator=g)[: max(k, 1)] for _ in range(batch.mask.numel())])

    def logprobs(piece):
        logp = (hidden[piece] @ weight).log_softmax(-1)
        return LogProbs(
            logp=logp.gather(-1, tokens[piece, None])[:, 0],
            entropy=-(logp.exp() * logp).sum(-1),
            topk=logp.gather(-1, top[piece]) if k else None,
        )

    return weight, logprobs


@pytest.mark.parametrize("name", METHODS)
def test_pieces_equal_the_whole(name):
    knobs = METHODS[name]
    batch = full_batch(knobs, 3)
    objective = policy_loss(**knobs)
    shape, n = batch.mask.shape, batch.mask.numel()
    weight, logprobs = head(batch, objective.needs_topk)
    whole = logprobs(slice(0, n))
    top = None if whole.topk is None else whole.topk.reshape(*shape, -1)
    batch = batch.with_(
        logp=whole.logp.reshape(shape),
        logp_topk=top,
        entropy=whole.entropy.reshape(shape),
        logp_old=whole.logp.detach().reshape(shape) + 0.1 * batch.logp_old.detach().sin(),
        logp_mu=whole.logp.detach().reshape(shape) + 0.2 * batch.logp_mu.sin(),
    )
    objective.begin_batch([batch])
    direct = objective(batch)
    (expected,) = torch.autograd.grad(direct.loss, weight)
    assert expected.abs().max() > 1e-6

    scattered = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    for pieces in ([slice(0, n)], [slice(0, 20), slice(20, 33), slice(33, n)], list(scattered.chunk(4))):
        weight.grad = None
        out = two_pass_backward(objective, batch, pieces, logprobs)
        torch.testing.assert_close(out.loss, direct.loss.detach())
        torch.testing.assert_close(weight.grad, expected, atol=1e-12, rtol=1e-9)
        assert out.metrics.finalize() == pytest.approx(direct.metrics.finalize())


def test_context_parallel_shards_add_up_to_the_whole():
    """Each rank holds every other token of a response-level method; the gather restores flat order."""
    knobs = METHODS["gspo"]
    batch = random_batch(seed=4, dtype=torch.float64)
    objective = policy_loss(**knobs)
    n, shape = batch.mask.numel(), batch.mask.shape
    weight, logprobs = head(batch)
    whole = logprobs(slice(0, n)).logp
    batch = batch.with_(
        logp=whole.reshape(shape),
        logp_old=whole.detach().reshape(shape) + 0.1 * batch.logp_old.sin(),
        logp_mu=whole.detach().reshape(shape),
    )
    (expected,) = torch.autograd.grad(objective(batch).loss, weight)
    shards = [torch.arange(0, n, 2), torch.arange(1, n, 2)]
    both = torch.zeros(n, dtype=torch.float64)
    with torch.no_grad():
        for shard in shards:
            both[shard] = logprobs(shard).logp
    total = 0.0
    for shard in shards:
        weight.grad = None
        two_pass_backward(
            objective, batch, list(shard.chunk(2)), logprobs, gather=lambda parts: LogProbs(logp=both.clone())
        )
        total = total + weight.grad
    torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-9)


def test_two_pass_is_asked_for_where_whole_responses_matter():
    wanted = {"gspo", "tbpo", "tbpo truncate", "reinforce sequence", "opsm", "opsm surviving"}
    assert {name for name, knobs in METHODS.items() if policy_loss(**knobs).two_pass} == wanted
