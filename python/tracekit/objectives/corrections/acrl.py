"""ACRL: a token weight that steers the discrepancy of sampler and learner towards its reference.

    d = |exp(logp_old) - exp(logp_mu)|        Y = mean of d (per response, prompt or batch)     X = Y before training
    alpha = gamma sign(A) (1 - Y / X)         u = min(rho^alpha, C)

Source: arXiv 2607.24062 eqs 8-12, gamma and C of its section 5 (gamma .65, C 3; 5 under truncating FP8). Its formula
averages Y over the group, its text speaks of the current sequence: `y_level`. No lower bound, alpha unbounded unless
`alpha_max` is set. Variants of its Table 10: `continuous` (alpha = -acrl_alpha sign A) and `fallback` (u = 1 if Y < X);
ours: `reverse` (u = 1 if Y > X), `const` (alpha = acrl_alpha, tempered TIS), `measure` (u = 1, everything is logged).
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.state import ObjectiveState, discrepancy
from tracekit.objectives.terms import Terms, safe_exp

X_MIN = 1e-6
"""Below this reference the ratio Y / X says nothing: the weight is 1 (our rule)."""
VARIANTS = ("full", "continuous", "fallback", "reverse", "const", "measure")
LEVELS = ("sequence", "group", "batch")


@dataclass(kw_only=True, slots=True)
class ACRLKnobs:
    """Adaptive control of the discrepancy."""

    gamma: float = 0.65
    """Strength; .35 or .65 in the paper, its sweep succeeds from .1 to 1.7."""
    is_cap: float = 3.0
    """C, upper bound of the weight, above 1."""
    x_reference: float | None = None
    """X; None measures it at the first rollout batch."""
    y_level: Literal["sequence", "group", "batch"] = "sequence"
    """What Y averages over (the paper can be read either way; measure all three)."""
    acrl_variant: Literal["full", "continuous", "fallback", "reverse", "const", "measure"] = "full"
    """Full method, a one-sided ablation, or `measure`."""
    acrl_alpha: float = 1.0
    """Fixed |alpha| of `continuous` (1 works and 3 collapses in the paper) and alpha of `const`."""
    alpha_max: float | None = None
    """Bound of |alpha|; None leaves it unbounded, as published."""


class ACRL(Correction):
    """Adaptive exponent of the mismatch ratio."""

    name = "acrl"
    only_losses = ("grpo", "ppo", "dapo", "dr_grpo")
    Knobs = ACRLKnobs

    def check(self) -> str | None:
        k = self.knobs
        if k.gamma <= 0:
            return f"gamma={k.gamma} must be above 0 (0 is the plain surrogate: use correction none)"
        if k.is_cap <= 1:
            return f"is_cap={k.is_cap} must be above 1"
        if k.x_reference is not None and k.x_reference <= 0:
            return f"x_reference={k.x_reference} must be above 0, or left out to measure it"
        if k.acrl_variant not in VARIANTS:
            return f"acrl_variant={k.acrl_variant!r} is none of {', '.join(VARIANTS)}"
        if k.y_level not in LEVELS:
            return f"y_level={k.y_level!r} is none of {', '.join(LEVELS)}"
        return None if k.alpha_max is None or k.alpha_max > 0 else f"alpha_max={k.alpha_max} must be above 0"

    def prepare_state(self, state: ObjectiveState) -> None:
        if self.knobs.x_reference is not None:
            state.x, state.x_source = self.knobs.x_reference, "given"

    def _y(self, t: Terms, state: ObjectiveState) -> Tensor:
        """Y of each response [n], at the configured level."""
        level = self.knobs.y_level
        if level == "sequence":
            return discrepancy(t)
        if level == "batch" and state.batch_y is not None:
            return t.old.new_full((t.seg.n,), state.batch_y)
        if level == "group" and t.batch.group is None:
            raise DataError("acrl: y_level='group' needs LossBatch.group")
        try:
            ys = [state.group_y[g] for g in t.batch.group.tolist()] if level == "group" else None
        except KeyError:
            ys = None
        if ys is None:
            raise DataError(f"acrl: y_level={level!r} has no Y of this batch; call Objective.begin_batch before it")
        return t.old.new_tensor(ys)

    def alpha(self, t: Terms, state: ObjectiveState) -> Tensor:
        """Exponent [T], detached."""
        k, sign = self.knobs, torch.sign(t.adv)
        if k.acrl_variant == "continuous":
            alpha = -k.acrl_alpha * sign
        elif k.acrl_variant == "const":
            alpha = torch.full_like(sign, k.acrl_alpha)
        else:
            if state.x is None:
                raise DataError("acrl: the reference X is not known; call Objective.begin_batch on the first batch")
            if state.x < X_MIN:
                warnings.warn(f"acrl: X = {state.x:.2g} is below {X_MIN}; weights are 1", stacklevel=2)
                return torch.zeros_like(sign)
            excess = 1 - t.seg.spread(self._y(t, state)) / state.x
            if k.acrl_variant == "fallback":
                excess = excess.clamp(max=0.0)
            elif k.acrl_variant == "reverse":
                excess = excess.clamp(min=0.0)
            alpha = k.gamma * sign * excess
        return alpha if k.alpha_max is None else alpha.clamp(-k.alpha_max, k.alpha_max)

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        alpha = self.alpha(t, state)
        raw = safe_exp(alpha * t.lam)
        cap = self.knobs.is_cap
        weight = torch.ones_like(raw) if self.knobs.acrl_variant == "measure" else raw.clamp(max=cap)
        return Weights(weight=weight, raw=raw, capped=raw > cap, extra={"alpha": alpha})

    def record(self, m: Metrics, t: Terms, w: Weights, state: ObjectiveState) -> None:
        alpha, lam, dtype = w.extra["alpha"], t.lam, t.old.dtype
        up, down, positive, negative = lam > 0, lam < 0, t.adv > 0, t.adv < 0
        values = {
            "acrl/alpha_mean": alpha,
            "acrl/frac_rho_gt_C": (w.raw > self.knobs.is_cap).to(dtype),
            "acrl/frac_u_lt_0.1": (w.weight < 0.1).to(dtype),
            "acrl/rho_mean": w.raw,
            "acrl/quadrant_1_frac": (positive & down).to(dtype),
            "acrl/quadrant_2_frac": (positive & up).to(dtype),
            "acrl/quadrant_3_frac": (negative & up).to(dtype),
            "acrl/quadrant_4_frac": (negative & down).to(dtype),
        }
        m.means("acrl", values, t.live)
        m.maxima("acrl", {"acrl/alpha_absmax": alpha.abs(), "acrl/rho_max": w.raw, "-acrl/rho_min": -w.raw}, t.live)
