"""Fixture F1: one prompt, two responses of three and two tokens, and ways to lay them out."""

import torch

from tracekit.objectives import LossBatch

MU = [[0.50, 0.20, 0.90], [0.10, 0.40, 1.0]]
OLD = [[0.45, 0.25, 0.90], [0.02, 0.50, 1.0]]
THETA = [[0.60, 0.26, 0.88], [0.05, 0.45, 1.0]]
ADV = [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]
MASK = [[True, True, True], [True, True, False]]


def f1(dtype=torch.float32, **extra) -> LossBatch:
    """F1, padded [2, 3]."""
    logp, old, mu = (torch.tensor(p, dtype=torch.float64).log().to(dtype) for p in (THETA, OLD, MU))
    return LossBatch(
        logp=logp.requires_grad_(),
        logp_old=old,
        logp_mu=mu,
        advantages=torch.tensor(ADV, dtype=dtype),
        mask=torch.tensor(MASK),
        group=torch.tensor([7, 7]),
        **extra,
    )


TOKEN_FIELDS = ("logp", "logp_old", "logp_mu", "advantages", "mask", "logp_ref", "entropy", "logp_topk", "logp_mu_topk")


def random_batch(n=6, length=9, seed=0, dtype=torch.float32, group=3, spread=0.3) -> LossBatch:
    """Random padded batch with ragged lengths, one empty response and prompts of `group` responses."""
    g = torch.Generator().manual_seed(seed)

    def noise():
        return spread * torch.randn(n, length, generator=g, dtype=torch.float64)

    mu = torch.randn(n, length, generator=g, dtype=torch.float64).abs().neg() - 0.05
    old = (mu + noise()).clamp(max=-1e-3)
    logp = (old + noise()).clamp(max=-1e-3)
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    lengths[n // 2] = 0
    mask = torch.arange(length)[None] < lengths[:, None]
    adv = torch.randn(n, 1, generator=g, dtype=torch.float64).expand(n, length)
    return LossBatch(
        logp=logp.to(dtype).requires_grad_(),
        logp_old=old.to(dtype),
        logp_mu=mu.to(dtype),
        advantages=adv.to(dtype),
        mask=mask,
        group=torch.arange(n) // group,
    )


def rows(batch: LossBatch, index, totals=None) -> LossBatch:
    """Some responses of a padded batch."""
    changes = {f: None if getattr(batch, f) is None else getattr(batch, f)[index] for f in TOKEN_FIELDS}
    per_response = {
        f: None if getattr(batch, f) is None else getattr(batch, f)[index] for f in ("group", "version_lag")
    }
    changes["logp"] = leaf(changes["logp"])
    return batch.with_(**changes, **per_response, totals=totals)


def leaf(x):
    """A leaf with the same values."""
    return x.detach().clone().requires_grad_()


def packed(batch: LossBatch, *, front=2, gap=1, fill=float("nan")) -> LossBatch:
    """The same responses on one token axis, behind prompt tokens and gaps that hold `fill`."""
    n, length = batch.mask.shape
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]
    source, ids = [-1] * front, [-1] * front
    for i, size in enumerate(lengths):
        source += [i * length + j for j in range(size)] + [-1] * gap
        ids += [i] * size + [-1] * gap
    source = torch.tensor(source)
    take = source.clamp(min=0)

    def lay(x):
        flat = x.detach().reshape(-1, *x.shape[2:])[take].clone()
        flat[source < 0] = True if x.dtype == torch.bool else fill
        return flat

    changes = {f: None if getattr(batch, f) is None else lay(getattr(batch, f)) for f in TOKEN_FIELDS}
    changes["logp"] = leaf(changes["logp"])
    return batch.with_(**changes, segment_ids=torch.tensor(ids), n_segments=n)


def gradient(objective, batch: LossBatch):
    """loss, d loss/d logp by autograd, coefficients: at the masked-in tokens in order."""
    out = objective(batch)
    (grad,) = torch.autograd.grad(out.loss, batch.logp)
    ids = batch.segment_ids if batch.segment_ids is not None else torch.zeros_like(batch.mask, dtype=torch.long)
    where = batch.mask & (ids >= 0)
    assert torch.count_nonzero(grad[~where]) == 0
    assert torch.count_nonzero(out.coefficients[~where]) == 0
    return out.loss.detach(), grad[where], out.coefficients[where], out
