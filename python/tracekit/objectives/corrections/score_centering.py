"""Score Centering: subtract the weighted score's expectation under the sampler, so that its mean is zero.

    ell = -A (w_a logp_a - sum_v sg(q_v w_v) logp_v),   w = f(p / q),   f(x) = min(x, cap) or 1

q the sampler's distribution, p the learner's. Of the vocabulary only the sampler's K most likely tokens (the head) are
needed; the tail is modelled as q_v = rr p_v with rr = (1 - sum_head q) / (1 - sum_head p), hence
sum_tail sg(q w) logp = alpha (sum_all sg(p) logp - sum_head sg(p) logp), alpha = rr f(1 / rr); the full sum has no
gradient and is left out. f and cap are the surrogate's (`ratio_level`, `ratio_cap`).

Source: arXiv 2609.20807 and its code; K = 128 and cap 2 as in TRACE, 2610.07767 section 4.4. A sampled token outside
the head keeps its own exact w_a and is not added to the head (an assumption).
"""

from dataclasses import dataclass

import torch

from tracekit.errors import ConfigError, DataError
from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.losses.base import PolicyLoss
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp

_FLOOR = 1e-6
"""Least tail mass; keeps rr finite when the head holds everything."""


@dataclass(kw_only=True, slots=True)
class ScoreCenteringKnobs:
    """Centre of the score."""

    sc_topk: int = 128
    """K, the sampler's most likely tokens that the rollout must return at each position."""


class ScoreCentering(Correction):
    """Zero-mean policy gradient under the sampler."""

    name = "score_centering"
    needs_old = False
    only_losses = ("reinforce",)
    Knobs = ScoreCenteringKnobs

    def __init__(self, knobs: ScoreCenteringKnobs):
        super().__init__(knobs)
        self.needs_topk = knobs.sc_topk
        self._cap: float | None = None

    def check(self) -> str | None:
        return None if self.knobs.sc_topk >= 1 else f"sc_topk={self.knobs.sc_topk} must be at least 1"

    def bind(self, loss: PolicyLoss) -> None:
        if loss.knobs.ratio_level == "sequence":
            raise ConfigError("score_centering: the centre is one of token ratios; use ratio_level token or none")
        self._cap = None if loss.knobs.ratio_level == "none" else loss.knobs.ratio_cap

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        ones = torch.ones_like(t.mu)
        if t.batch.logp is None:
            return Weights(weight=ones)
        if t.batch.logp_topk is None or t.batch.logp_mu_topk is None:
            raise DataError("score_centering needs LossBatch.logp_topk and logp_mu_topk, [..., K]")
        raw_p = t.batch.flat(t.batch.logp_topk).to(t.mu.dtype)
        raw_q = t.batch.flat(t.batch.logp_mu_topk).detach().to(t.mu.dtype)
        head = t.live[:, None] & torch.isfinite(raw_q)
        logp, logq = torch.where(head, raw_p, 0.0), torch.where(head, raw_q, 0.0)
        p = torch.where(head, torch.exp(logp.detach()), 0.0)
        q = torch.where(head, torch.exp(logq), 0.0)
        w = torch.ones_like(p) if self._cap is None else safe_exp(logp.detach() - logq).clamp(max=self._cap)
        rr = (1 - q.sum(-1)).clamp(min=_FLOOR) / (1 - p.sum(-1)).clamp(min=_FLOOR)
        tail = rr if self._cap is None else rr * (1 / rr).clamp(max=self._cap)
        slope = t.adv[:, None] * torch.where(head, q * w - tail[:, None] * p, 0.0)
        return Weights(
            weight=ones,
            centre=(slope * logp).sum(-1),
            topk_slope=slope,
            extra={"head_mass_mu": q.sum(-1), "head_mass": p.sum(-1), "kl_head": (q * (logq - logp.detach())).sum(-1)},
        )

    def record(self, m: Metrics, t: Terms, w: Weights, state: ObjectiveState) -> None:
        m.means("sc", {f"score_centering/{k}": v for k, v in w.extra.items()}, t.live)
