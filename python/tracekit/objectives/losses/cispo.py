"""CISPO: the ratio is a clipped, detached weight of a REINFORCE term, so no token loses its gradient.

    ell = -sg(clip(r, 1 - low, 1 + high)) A logp

Source: MiniMax-M1, arXiv 2506.13585 (effectively no lower bound; only the upper one is tuned). The value of the
loss has no meaning, only its gradient. TRL's `epsilon_high` is the bound itself; here the bound is 1 + clip_ratio_high.
"""

from dataclasses import dataclass

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class CISPOKnobs:
    """Bounds of the weight."""

    clip_ratio_low: float | None = None
    """Lower bound is 1 minus this; None leaves it out."""
    clip_ratio_high: float = 0.28
    """Upper bound is 1 plus this. The value is an assumption, DAPO's."""


class CISPO(PolicyLoss):
    """Clipped importance weight, gradient on every token."""

    name = "cispo"
    aggregation = "token-mean"
    allows_bypass = True
    Knobs = CISPOKnobs

    def check(self) -> str | None:
        k = self.knobs
        if k.clip_ratio_low is not None and not 0 <= k.clip_ratio_low <= 1:
            return f"clip_ratio_low={k.clip_ratio_low} must lie in [0, 1] or be left out"
        return None if k.clip_ratio_high >= 0 else f"clip_ratio_high={k.clip_ratio_high} must not be negative"

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        k = self.knobs
        low = 0.0 if k.clip_ratio_low is None else 1 - k.clip_ratio_low
        high = 1 + k.clip_ratio_high
        r = safe_exp(t.delta.detach())
        weight = r.clamp(low, high)
        # The bounds only shorten the step here; the shares are reported like other methods', by sign.
        return Surrogate(
            ell=-weight * t.adv * t.logp,
            slope=-weight * t.adv,
            clipped_high=(t.adv > 0) & (r > high),
            clipped_low=(t.adv < 0) & (r < low),
            lines=(low, high),
        )
