"""REINFORCE on the sampler's distribution, weighted by the capped total ratio (two policies, no logp_old).

    ell = -sg(w) A logp,   w = min(exp(logp - logp_mu), ratio_cap) of the token, or of the product over the response

Source: truncated importance sampling in Ionides 2008; in this use verl's `bypass_mode` with `loss_type: reinforce`
(`core_algos.py`). The value of the loss has no meaning, only its gradient. With `correction="score_centering"` the same
w enters the centre.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class ReinforceKnobs:
    """Weight of the total ratio."""

    ratio_level: Literal["token", "sequence", "none"] = "token"
    """Ratio of the token, product over the response, or weight 1."""
    ratio_cap: float = 2.0
    """Upper bound of the weight; may be infinite."""


class Reinforce(PolicyLoss):
    """Policy gradient under the sampler, importance weight capped."""

    name = "reinforce"
    aggregation = "token-mean"
    uses_old = False
    owns_mismatch = True
    accepts_corrections = ("score_centering", "token_rejection", "sequence_rejection", "verl")
    Knobs = ReinforceKnobs

    def __init__(self, knobs: ReinforceKnobs):
        super().__init__(knobs)
        self.level = "sequence" if knobs.ratio_level == "sequence" else "token"

    def check(self) -> str | None:
        k = self.knobs
        if k.ratio_level not in ("token", "sequence", "none"):
            return f"ratio_level={k.ratio_level!r} is none of token, sequence, none"
        return None if k.ratio_cap > 0 else f"ratio_cap={k.ratio_cap} must be above 0"

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        k = self.knobs
        if k.ratio_level == "none":
            weight = torch.ones_like(t.mu)
            capped = None
        else:
            raw = safe_exp(t.tot if k.ratio_level == "token" else t.seg.spread(t.total(t.tot)))
            weight, capped = raw.clamp(max=k.ratio_cap), raw > k.ratio_cap
        return Surrogate(
            ell=-weight * t.adv * t.logp,
            slope=-weight * t.adv,
            clipped_high=None if capped is None else capped & (t.adv > 0),
            clipped_dual=None if capped is None else capped & (t.adv < 0),
            lines=(0.0, k.ratio_cap),
        )
