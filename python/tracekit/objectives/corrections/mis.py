"""Masked importance sampling: the response's ratio as weight, 0 outside a band.

    u_i = R_i 1[low <= R_i <= cap],   R_i = prod_t rho_t  or its geometric mean
    (mis_weight="token": the band decides on R_i, tokens inside are weighted by their own rho)

Source: ACRL, arXiv 2607.24062 eq. 3 (product, no lower bound); the mixed form is NeMo-RL's `seq-mask-tis`.
Products vanish for long responses: with a mean log rho of -0.0345 over 1000 tokens, u is 1e-15.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class MISKnobs:
    """Masked importance sampling."""

    is_cap: float = 3.0
    """Responses above it are dropped (3 in ACRL's comparisons, 5 under truncating FP8; 2 is common elsewhere)."""
    is_low: float = 0.0
    """Responses below it are dropped."""
    mis_mean: Literal["product", "geometric"] = "product"
    """Ratio of the response."""
    mis_weight: Literal["response", "token"] = "response"
    """Weight inside the band: the response's ratio, or each token's."""


class MIS(Correction):
    """Sequence masked importance sampling."""

    name = "mis"
    level = "sequence"
    Knobs = MISKnobs

    def check(self) -> str | None:
        k = self.knobs
        if k.mis_mean not in ("product", "geometric"):
            return f"mis_mean={k.mis_mean!r} is neither product nor geometric"
        if k.mis_weight not in ("response", "token"):
            return f"mis_weight={k.mis_weight!r} is neither response nor token"
        return None if 0 <= k.is_low < k.is_cap else f"is_low={k.is_low} must lie in [0, is_cap={k.is_cap})"

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        k = self.knobs
        log_ratio = t.total(t.lam) if k.mis_mean == "product" else t.mean(t.lam)
        # Decided in log space: the clamp of exp must not let a huge product pass as e^20.
        keep = log_ratio <= math.log(k.is_cap)
        if k.is_low > 0:
            keep = keep & (log_ratio >= math.log(k.is_low))
        response = t.seg.spread(safe_exp(log_ratio))
        weight = response if k.mis_weight == "response" else safe_exp(t.lam)
        kept = t.seg.spread(keep)
        return Weights(weight=torch.where(kept, weight, 0.0), keep=kept, raw=response, capped=~kept)
