"""MiniRL: REINFORCE with PPO's sign-aware mask on r; with `correction="tis", is_cap=5` its published form.

    ell = -sg(r m) A logp,   m = 0 if (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low), else 1

Source: arXiv 2512.01374 as summarised (we do not hold its text); its gradient equals PPO's clipped one with these
bounds coefficient by coefficient, so TRACE's "GRPO with cap 5" differs from it by bounds and aggregation alone.
"""

from dataclasses import dataclass

import torch

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class MiniRLKnobs:
    """Bounds of the mask."""

    clip_ratio_low: float = 0.2
    """Negative advantages lose their gradient below 1 minus this."""
    clip_ratio_high: float = 0.27
    """Positive advantages lose their gradient above 1 plus this."""


class MiniRL(PolicyLoss):
    """Masked REINFORCE."""

    name = "minirl"
    aggregation = "token-mean"
    Knobs = MiniRLKnobs

    def check(self) -> str | None:
        k = self.knobs
        if k.clip_ratio_low < 0 or k.clip_ratio_high < 0:
            return f"clip_ratio_low={k.clip_ratio_low} and clip_ratio_high={k.clip_ratio_high} must not be negative"
        return None

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        low, high = 1 - self.knobs.clip_ratio_low, 1 + self.knobs.clip_ratio_high
        r = safe_exp(t.delta.detach())
        clipped_high, clipped_low = (t.adv > 0) & (r > high), (t.adv < 0) & (r < low)
        weight = torch.where(clipped_high | clipped_low, 0.0, r)
        return Surrogate(
            ell=-weight * t.adv * t.logp,
            slope=-weight * t.adv,
            clipped_low=clipped_low,
            clipped_high=clipped_high,
            lines=(low, high),
        )
