"""PPO's clipped surrogate, with the optional dual clip.

    ell = -min(r A, clip(r, 1 - low, 1 + high) A),   r = exp(logp - logp_old)
    dual clip, A < 0:  ell = min(ell, -c A)

Sources: PPO, arXiv 1707.06347 eq. 7; dual clip, 1912.09729. d ell/d logp is -A r, or 0 where clipped: A > 0 and
r > 1 + high, A < 0 and r < 1 - low, A < 0 and r > c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.terms import LOG_RATIO_LIMIT, Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class ClipKnobs:
    """Bounds of the ratio."""

    clip_ratio_low: float = 0.2
    """Lower bound is 1 minus this."""
    clip_ratio_high: float = 0.2
    """Upper bound is 1 plus this."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the ratio for negative advantages, above 1; None switches it off (verl's default is 3)."""


def clip_surrogate(delta: Tensor, adv: Tensor, low: float, high: Tensor | float, c: float | None) -> Surrogate:
    """The clipped surrogate of log-ratio `delta` [T] (graph); `high` is the upper bound itself, number or [T]."""
    r = safe_exp(delta)
    ratio = r.detach()
    high = torch.as_tensor(high, dtype=r.dtype, device=r.device)
    # Not torch.minimum: on the bound itself it would halve the gradient that strict clipping leaves whole.
    bounded = torch.where(ratio > high, high, r.clamp(min=low))
    ell = -torch.minimum(r * adv, bounded * adv)
    clipped_high = (adv > 0) & (ratio > high)
    clipped_low = (adv < 0) & (ratio < low)
    clipped_dual = None
    if c is not None:
        clipped_dual = (adv < 0) & (ratio > c)
        ell = torch.where(clipped_dual, -c * adv, ell)
    stopped = clipped_high | clipped_low
    if clipped_dual is not None:
        stopped = stopped | clipped_dual
    moving = ~stopped & (delta.detach().abs() <= LOG_RATIO_LIMIT)
    return Surrogate(
        ell=ell,
        slope=torch.where(moving, -adv * ratio, 0.0),
        clipped_low=clipped_low,
        clipped_high=clipped_high,
        clipped_dual=clipped_dual,
    )


class PPO(PolicyLoss):
    """Clipped surrogate on critic advantages, averaged over tokens."""

    name = "ppo"
    advantage = "gae"
    aggregation = "token-mean"
    clips_ratio = True
    allows_bypass = True
    Knobs = ClipKnobs

    def check(self) -> str | None:
        k = self.knobs
        if not 0 <= k.clip_ratio_low <= 1 or k.clip_ratio_high < 0:
            return (
                f"clip_ratio_low={k.clip_ratio_low} must lie in [0, 1] and clip_ratio_high={k.clip_ratio_high} be >= 0"
            )
        if k.clip_ratio_c is not None and k.clip_ratio_c <= 1:
            return f"clip_ratio_c={k.clip_ratio_c} must be above 1"
        return None

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        k = self.knobs
        high = 1 + k.clip_ratio_high
        if w.high_scale is not None:
            high = high * w.high_scale
        s = clip_surrogate(t.delta, t.adv, 1 - k.clip_ratio_low, high, k.clip_ratio_c)
        s.lines = (1 - k.clip_ratio_low, 1 + k.clip_ratio_high)
        return s
