"""Rejection: tokens or whole responses with a ratio outside a band leave the loss; weight 1 inside.

    token_rejection      keep token t     if low <= rho_t <= high
    sequence_rejection   keep response i  if low <= R_i <= high,   R_i product or geometric mean of its rho
    both                 drop response i  if some rho_t < veto_min

Bands are on rho itself (verl's k1 bands are on 1/rho: see `verl.py`). In bypass mode and for two-policy losses
rho is exp(logp - logp_mu). Sources: verl's `rollout_rs` and slime's `rs_veto_threshold`, as documented there.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class TokenRejectionKnobs:
    """Band of the token ratio."""

    reject_low: float = 0.5
    """Lower bound."""
    reject_high: float = 5.0
    """Upper bound."""
    veto_min: float = 0.0
    """A response with a token ratio below this is dropped whole; 0 switches it off (slime's default is 1e-4)."""


@dataclass(kw_only=True, slots=True)
class SequenceRejectionKnobs(TokenRejectionKnobs):
    """Band of the response ratio."""

    reject_high: float = 2.0
    """Upper bound."""
    reject_mean: Literal["product", "geometric"] = "geometric"
    """Ratio of the response. Bands such as .999 to 1.001 suit dense BF16 engines, not FP4: choose from quantiles."""


def veto(t: Terms, threshold: float) -> Tensor:
    """[T] bool: false on responses with a token ratio below `threshold`."""
    low = t.live & (t.lam < math.log(threshold))
    return t.seg.spread(t.seg.sum(low.to(t.old.dtype)) == 0)


class TokenRejection(Correction):
    """Token-level band, weight 1."""

    name = "token_rejection"
    needs_old = False
    rejects = True
    Knobs = TokenRejectionKnobs

    def check(self) -> str | None:
        k = self.knobs
        if not 0 <= k.reject_low < k.reject_high:
            return f"reject_low={k.reject_low} must lie in [0, reject_high={k.reject_high})"
        return None if 0 <= k.veto_min < 1 else f"veto_min={k.veto_min} must lie in [0, 1)"

    def keep(self, t: Terms) -> tuple[Tensor, Tensor]:
        """Keep-mask [T] and the ratio it tests [T]."""
        rho = safe_exp(t.lam)
        return (rho >= self.knobs.reject_low) & (rho <= self.knobs.reject_high), rho

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        keep, ratio = self.keep(t)
        if self.knobs.veto_min > 0:
            keep = keep & veto(t, self.knobs.veto_min)
        return Weights(weight=torch.ones_like(ratio), keep=keep, raw=ratio)


class SequenceRejection(TokenRejection):
    """Response-level band, weight 1."""

    name = "sequence_rejection"
    level = "sequence"
    Knobs = SequenceRejectionKnobs

    def check(self) -> str | None:
        if self.knobs.reject_mean not in ("product", "geometric"):
            return f"reject_mean={self.knobs.reject_mean!r} is neither product nor geometric"
        return super().check()

    def keep(self, t: Terms) -> tuple[Tensor, Tensor]:
        k = self.knobs
        log_ratio = t.total(t.lam) if k.reject_mean == "product" else t.mean(t.lam)
        keep = log_ratio <= math.log(k.reject_high)
        if k.reject_low > 0:
            keep = keep & (log_ratio >= math.log(k.reject_low))
        return t.seg.spread(keep), t.seg.spread(safe_exp(log_ratio))
