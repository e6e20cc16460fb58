"""DPPO with the total-variation mask: a token stops when its probability has moved too far, not its ratio.

    ell = -sg(m exp(logp - logp_mu)) A logp + tau (logp - logp_mu)^2
    m = 0 if (A > 0 and p - q > high) or (A < 0 and q - p > low), else 1,   p = exp(logp), q = exp(logp_mu)

Sources: arXiv 2602.04879; numbers and the quadratic term from prime-rl (`loss.py`). Two policies: logp_old is not used.
A bound on probabilities does not stop rare tokens early, as one on ratios does.
"""

from dataclasses import dataclass

import torch

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class DPPOKnobs:
    """Bounds in probability and the quadratic term."""

    tv_low: float = 0.2
    """Negative advantages stop when the probability fell by more than this."""
    tv_high: float = 0.2
    """Positive advantages stop when the probability rose by more than this."""
    kl_tau: float = 1e-3
    """Weight of (logp - logp_mu)^2, on every token; 0 leaves it out."""


class DPPOTV(PolicyLoss):
    """Total ratio as weight, mask on the probability's move."""

    name = "dppo_tv"
    aggregation = "token-mean"
    uses_old = False
    owns_mismatch = True
    Knobs = DPPOKnobs

    def check(self) -> str | None:
        k = self.knobs
        if not (0 < k.tv_low <= 1 and 0 < k.tv_high <= 1):
            return f"tv_low={k.tv_low} and tv_high={k.tv_high} must lie in (0, 1]"
        return None if k.kl_tau >= 0 else f"kl_tau={k.kl_tau} must not be negative"

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        k = self.knobs
        move = torch.exp(t.sg_logp) - torch.exp(t.mu)
        clipped_high, clipped_low = (t.adv > 0) & (move > k.tv_high), (t.adv < 0) & (-move > k.tv_low)
        weight = torch.where(clipped_high | clipped_low, 0.0, safe_exp(t.tot))
        gap = t.logp - t.mu
        return Surrogate(
            ell=-weight * t.adv * t.logp + k.kl_tau * gap * gap,
            slope=-weight * t.adv + 2 * k.kl_tau * gap.detach(),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
        )
