"""Off-policy sequence masking: a negative response that the policy has already moved away from leaves the loss.

    drop_i = A_i < 0  and  mean_t (ref - logp) > delta,   ref = logp_old or logp_mu

Source: DeepSeek-V3.2, arXiv 2512.02556 (as summarised); slime compares with pi_old (delta 1e-4), TRL with mu. The
denominators stay.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class OPSMKnobs:
    """Off-policy sequence masking."""

    opsm_delta: float = 1e-4
    """Largest mean log-ratio a negative response may have lost (slime's value for `old`)."""
    opsm_reference: Literal["old", "mu"] = "old"
    """What logp is compared with."""


class OPSM(Correction):
    """Response mask on negative advantages."""

    name = "opsm"
    level = "sequence"
    needs_old = False
    rejects = True
    drops_by_logp = True
    Knobs = OPSMKnobs

    def check(self) -> str | None:
        if self.knobs.opsm_reference not in ("old", "mu"):
            return f"opsm_reference={self.knobs.opsm_reference!r} is neither old nor mu"
        return None

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        gap = t.mean((t.old if self.knobs.opsm_reference == "old" else t.mu) - t.sg_logp)
        drop = (t.mean(t.adv) < 0) & (gap > self.knobs.opsm_delta)
        return Weights(weight=torch.ones_like(t.old), keep=t.seg.spread(~drop), raw=t.seg.spread(safe_exp(-gap)))
