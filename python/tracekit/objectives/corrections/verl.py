"""verl's rollout correction, knob for knob: importance weights, rejection statistics and their thresholds.

With lam = logp_old - logp_mu (clamped to ±20):
    weights    token exp(lam), sequence exp(sum lam); capped by a number, or a band "lo_hi" that zeroes (IcePop)
    statistics k1 = -lam, k2 = lam^2 / 2, k3 = exp(lam) - 1 - lam; token_*, seq_sum_*, seq_mean_*, seq_max_k2/k3
    thresholds k1: "lo_hi" or u meaning (1/u, u), compared with the logarithm of the bounds; k2, k3: an upper bound
All statistics must pass. As in verl the k1 band is on -lam, so "lo_hi" keeps rho in [1/hi, 1/lo]; our own `icepop` and
`*_rejection` have their bands on rho. Source: `verl/trainer/ppo/rollout_corr_helper.py` as documented. Presets:
`correction="verl:decoupled_geo_rs"` and the others in `presets.py`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import LOG_RATIO_LIMIT, Terms, safe_exp

STATISTICS = tuple(f"{where}_{k}" for where in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")) + (
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(kw_only=True, slots=True)
class VerlKnobs:
    """Rollout correction by verl's names."""

    rollout_is: str | None = None
    """token, sequence (product), or None for weights of 1."""
    rollout_is_threshold: float | str = 2.0
    """Cap of the weight, or "lo_hi": weights outside are zero."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the step."""
    rollout_rs: str | None = None
    """Comma-separated statistics, all of which must pass."""
    rollout_rs_threshold: float | str | None = None
    """One threshold a statistic, comma-separated."""


def parse_band(text: float | str) -> tuple[float, float]:
    """ "lo_hi" or u, which means (1/u, u). Raises: ValueError."""
    low, _, high = str(text).partition("_")
    band = (float(low), float(high)) if high else (1 / float(low), float(low))
    if not 0 < band[0] < band[1]:
        raise ValueError(text)
    return band


class Verl(Correction):
    """verl's weights and rejections."""

    name = "verl"
    rejects = True
    Knobs = VerlKnobs

    def __init__(self, knobs: VerlKnobs):
        super().__init__(knobs)
        self.needs_old = knobs.rollout_is is not None
        self.batch_normalize = knobs.rollout_is_batch_normalize
        rs = [s.strip() for s in knobs.rollout_rs.split(",")] if knobs.rollout_rs else []
        bounds = str(knobs.rollout_rs_threshold).split(",") if knobs.rollout_rs_threshold is not None else []
        self._rules = list(zip(rs, bounds, strict=False))
        self._counts = (len(rs), len(bounds))
        if knobs.rollout_is == "sequence" or any(s.startswith("seq") for s in rs):
            self.level = "sequence"

    def check(self) -> str | None:
        k = self.knobs
        if k.rollout_is not in (None, "token", "sequence"):
            return f"rollout_is={k.rollout_is!r} is neither token nor sequence"
        if self._counts[0] != self._counts[1]:
            return f"rollout_rs names {self._counts[0]} statistics, rollout_rs_threshold has {self._counts[1]} numbers"
        for statistic, bound in self._rules:
            if statistic not in STATISTICS:
                return f"rollout_rs={statistic!r} is none of {', '.join(STATISTICS)}"
            try:
                _ = parse_band(bound) if statistic.endswith("k1") else float(bound)
            except (ValueError, ZeroDivisionError):
                return f"rollout_rs_threshold={bound!r} does not fit {statistic} (k1: lo_hi or a number; else a number)"
        try:
            _ = parse_band(k.rollout_is_threshold)
        except (ValueError, ZeroDivisionError):
            return f"rollout_is_threshold={k.rollout_is_threshold!r} is neither a cap nor lo_hi"
        return None

    def _weights(self, t: Terms, lam: Tensor) -> tuple[Tensor, Tensor]:
        if self.knobs.rollout_is is None:
            ones = torch.ones_like(lam)
            return ones, ones
        raw = safe_exp(lam if self.knobs.rollout_is == "token" else t.seg.spread(t.total(lam)))
        if "_" in str(self.knobs.rollout_is_threshold):
            low, high = parse_band(self.knobs.rollout_is_threshold)
            return torch.where((raw >= low) & (raw <= high), raw, 0.0), raw
        return raw.clamp(max=float(self.knobs.rollout_is_threshold)), raw

    def _passes(self, t: Terms, lam: Tensor, statistic: str, bound: str) -> Tensor:
        where, _, kind = statistic.rpartition("_")
        value = {"k1": -lam, "k2": lam * lam / 2, "k3": torch.exp(lam) - 1 - lam}[kind]
        if where == "seq_sum":
            value = t.seg.spread(t.total(value))
        elif where == "seq_mean":
            value = t.seg.spread(t.mean(value))
        elif where == "seq_max":
            value = t.seg.spread(t.seg.max(torch.where(t.live, value, 0.0), empty=0.0))
        if kind == "k1":
            low, high = parse_band(bound)
            return (value >= math.log(low)) & (value <= math.log(high))
        return value <= float(bound)

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        lam = t.lam.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weight, raw = self._weights(t, lam)
        keep = torch.ones_like(t.live)
        for statistic, bound in self._rules:
            keep = keep & self._passes(t, lam, statistic, bound)
        return Weights(weight=weight, keep=keep, raw=raw, capped=weight != raw)

    def weight_totals(self, t: Terms, w: Weights) -> tuple[Tensor, Tensor]:
        if self.knobs.rollout_is != "sequence":
            return super().weight_totals(t, w)
        counted = t.length > 0
        return torch.where(counted, t.mean(w.weight), 0.0).sum().double(), counted.sum().double()
