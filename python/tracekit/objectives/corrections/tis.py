"""Truncated importance sampling.

    u = min(rho, is_cap),   rho = exp(logp_old - logp_mu) of the token, or the product over the response

Sources: ACRL, arXiv 2607.24062 eq. 2 (token level; its comparisons use a cap of 3, 5 under truncating FP8); TRACE,
2610.07767 section 4 (token level, cap 5). No lower bound, no gradient through u.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class TISKnobs:
    """Truncated importance sampling."""

    is_cap: float = 5.0
    """Upper bound of the weight (TRACE 5; 2 is common elsewhere). May be infinite."""
    is_level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or the product over its response."""


class TIS(Correction):
    """Token (or sequence) truncated importance sampling."""

    name = "tis"
    Knobs = TISKnobs

    def __init__(self, knobs: TISKnobs):
        super().__init__(knobs)
        self.level = knobs.is_level

    def check(self) -> str | None:
        return None if self.knobs.is_cap > 0 else f"is_cap={self.knobs.is_cap} must be above 0"

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        rho = safe_exp(t.lam if self.level == "token" else t.seg.spread(t.total(t.lam)))
        cap = self.knobs.is_cap
        return Weights(weight=torch.clamp(rho, max=cap), raw=rho, capped=rho > cap)
