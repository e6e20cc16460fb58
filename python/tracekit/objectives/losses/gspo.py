"""GSPO: the ratio, and its clip, of the whole response.

    s_i = exp((1/L_i) sum_t (logp - logp_old))
    J   = (1/M) sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

Source: arXiv 2507.18071; its token form `sg(s_i) exp(logp - sg(logp))` has the same value and, for one advantage a
response, the same gradient, and lets a token-level correction weigh single tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import LOG_RATIO_LIMIT, Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class GSPOKnobs:
    """Bounds of the response's ratio. Meant for long responses: the mean log-ratio of a short one varies more."""

    clip_ratio_low: float = 3e-4
    """Lower bound is 1 minus this."""
    clip_ratio_high: float = 4e-4
    """Upper bound is 1 plus this."""


def sequence_ratio(t: Terms) -> tuple[Tensor, Tensor]:
    """s_i [n] without graph, and its token form [T]: the same value, the gradient of one token's logp."""
    log_s = t.mean(t.delta.detach())
    s = safe_exp(log_s)
    # Outside the clamp the ratio no longer depends on logp, as in `safe_exp`.
    carrier = torch.where(t.seg.spread(log_s.abs() <= LOG_RATIO_LIMIT), t.logp - t.sg_logp, 0.0)
    return s, t.seg.spread(s) * torch.exp(carrier)


def record_sequence_ratio(m: Metrics, t: Terms, s: Tensor, prefix: str) -> None:
    """Mean and extremes of s, and its single values by the advantage's sign (for quantiles)."""
    counted = t.has(t.live)
    m.means(f"{prefix}:s", {f"{prefix}/seq_ratio_mean": s}, counted)
    m.maxima(f"{prefix}:s", {f"{prefix}/seq_ratio_max": s, f"-{prefix}/seq_ratio_min": -s}, counted)
    adv = t.mean(t.adv)
    # Infinite stands for "not of this sign": a fixed size keeps the device from waiting.
    m.sample(f"{prefix}/seq_ratio_positive", torch.where(counted & (adv > 0), s, torch.inf))
    m.sample(f"{prefix}/seq_ratio_negative", torch.where(counted & (adv < 0), s, torch.inf))


class GSPO(PolicyLoss):
    """Response-level clip."""

    name = "gspo"
    level = "sequence"
    allows_bypass = True
    Knobs = GSPOKnobs

    def check(self) -> str | None:
        k = self.knobs
        if not 0 <= k.clip_ratio_low <= 1 or k.clip_ratio_high < 0:
            return (
                f"clip_ratio_low={k.clip_ratio_low} must lie in [0, 1] and clip_ratio_high={k.clip_ratio_high} be >= 0"
            )
        return None

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        low, high = 1 - self.knobs.clip_ratio_low, 1 + self.knobs.clip_ratio_high
        s, token = sequence_ratio(t)
        ratio = t.seg.spread(s)
        adv = t.adv
        up, down = ratio > high, ratio < low
        bounded = torch.where(up, high, torch.where(down, low, token))
        clipped_high, clipped_low = (adv > 0) & up, (adv < 0) & down
        stopped = clipped_high | clipped_low | (t.seg.spread(t.mean(t.delta.detach())).abs() > LOG_RATIO_LIMIT)
        return Surrogate(
            ell=-torch.minimum(token * adv, bounded * adv),
            slope=torch.where(stopped, 0.0, -adv * ratio),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
            ratio=ratio,
            lines=(low, high),
        )

    def record(self, m: Metrics, t: Terms, s: Surrogate) -> None:
        record_sequence_ratio(m, t, sequence_ratio(t)[0], "policy")
