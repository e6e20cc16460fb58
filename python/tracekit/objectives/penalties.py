"""KL to a reference and entropy bonus, as terms of the loss. Neither is multiplied by the correction's weight.

With d = logp - logp_ref (clamped to ±20) and the result clamped to ±10:
    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d
Source: http://joschu.net/blog/kl-approx.html; clamps as in verl. As a loss on-policy, k1 has a gradient of mean
zero (it does nothing in expectation), k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi).
"""

import torch
from torch import Tensor

from tracekit.objectives.terms import LOG_RATIO_LIMIT

KL_ESTIMATORS = ("k1", "k2", "k3")
_KL_LIMIT = 10.0


def kl_penalty(logp: Tensor, logp_ref: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Token KL [T] with graph, and its detached derivative with respect to logp [T]."""
    raw = logp - logp_ref.detach()
    d = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        k, slope = d, torch.ones_like(d)
    elif estimator == "k2":
        k, slope = d * d / 2, d
    else:
        inverse = torch.exp(-d)
        k, slope = inverse - 1 + d, 1 - inverse
    inside = (raw.abs() <= LOG_RATIO_LIMIT) & (k.abs() <= _KL_LIMIT)
    return k.clamp(-_KL_LIMIT, _KL_LIMIT), torch.where(inside, slope, 0.0).detach()
