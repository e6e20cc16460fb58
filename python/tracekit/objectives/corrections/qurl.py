"""QuRL's adaptive clip range: where the importance weight was cut, the upper clip bound widens by the same factor.

    u = min(rho, C),   m = u / rho = min(1, C / rho),   upper bound (1 + high) / m

Source: QuRL, arXiv 2602.13953, its code read in a fork of verl. m is below 1 only where rho > C, so with every rho <= C
this is TIS. (Some summaries give the inverse factor.)
"""

from dataclasses import dataclass

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class QuRLKnobs:
    """Truncated weights with an adaptive clip range."""

    is_cap: float = 2.0
    """C, cap of the weight (an assumption: the usual cap)."""


class QuRL(Correction):
    """TIS whose cut weights buy a wider clip."""

    name = "qurl"
    needs_clip = True
    Knobs = QuRLKnobs

    def check(self) -> str | None:
        return None if self.knobs.is_cap > 0 else f"is_cap={self.knobs.is_cap} must be above 0"

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        rho = safe_exp(t.lam)
        weight = rho.clamp(max=self.knobs.is_cap)
        return Weights(weight=weight, raw=rho, capped=rho > self.knobs.is_cap, high_scale=rho / weight)
