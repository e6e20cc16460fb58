"""IcePop: token importance weights inside a band, nothing outside; the denominators stay.

    u = rho 1[low <= rho <= high]     (icepop_inside="one": 1 inside)

Source: IcePop (Ring-1T); band .5 to 5 as in verl, slime and NeMo-RL. One code base sets 1 inside, hence the switch.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class IcePopKnobs:
    """Band of the token ratio."""

    icepop_low: float = 0.5
    """Tokens with rho below it are dropped."""
    icepop_high: float = 5.0
    """Tokens with rho above it are dropped."""
    icepop_inside: Literal["ratio", "one"] = "ratio"
    """Weight inside the band."""


class IcePop(Correction):
    """Two-sided token mask with weights."""

    name = "icepop"
    rejects = True
    Knobs = IcePopKnobs

    def check(self) -> str | None:
        k = self.knobs
        if k.icepop_inside not in ("ratio", "one"):
            return f"icepop_inside={k.icepop_inside!r} is neither ratio nor one"
        ok = 0 <= k.icepop_low < k.icepop_high
        return None if ok else f"icepop_low={k.icepop_low} must lie in [0, icepop_high={k.icepop_high})"

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        k = self.knobs
        rho = safe_exp(t.lam)
        keep = (rho >= k.icepop_low) & (rho <= k.icepop_high)
        inside = rho if k.icepop_inside == "ratio" else torch.ones_like(rho)
        return Weights(weight=torch.where(keep, inside, 0.0), keep=keep, raw=rho, capped=~keep)
