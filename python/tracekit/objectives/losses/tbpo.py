"""TBPO, trust band policy optimisation: response-level ratios, a band for each sign, responses outside dropped.

    s_i = exp(mean_t (logp - logp_old))         w_i = exp(mean_t (logp_old - logp_mu))
    J   = (1/M) sum_i sg(min(w_i, C) K_i) s_i A_i
    K_i = 1[s_i <= 1 + e]                       A_i > 0
          1[1 - l <= s_i <= 1 + h]              A_i < 0, the dual band
          and 1[w_i <= C] with mismatch_mode="drop"

Source: QaRL, arXiv 2604.07853 section 3.2 for the geometric ratios, the response-level masking and the dual band. The
text we hold ends before the objective: its form above is an assumption, and every number below comes from a secondary
summary. Boundaries are kept. Short responses need wider bands (see docs/concepts/tbpo.md).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.losses.error_tokens import error_tokens
from tracekit.objectives.losses.gspo import record_sequence_ratio, sequence_ratio
from tracekit.objectives.losses.tbpo_advice import band_advice
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import LOG_RATIO_LIMIT, Terms, safe_exp


@dataclass(kw_only=True, slots=True)
class TBPOKnobs:
    """Bands of the response's ratio. Values from a secondary summary, for long responses."""

    seq_clip_ratio_high: float = 4e-4
    """e: a positive response leaves above 1 plus this. May be infinite."""
    neg_seq_clip_ratio_low: float = 3e-4
    """l: a negative response leaves below 1 minus this."""
    neg_seq_clip_ratio_high: float = 7e-4
    """h: a negative response leaves above 1 plus this."""
    seq_tis_imp_ratio_cap: float = 2.0
    """C, cap of the mismatch ratio w. May be infinite."""
    band_mode: Literal["drop", "truncate"] = "drop"
    """Outside the band: `drop` the response, or `truncate` its ratio's weight to the band's edge."""
    mismatch_mode: Literal["drop", "truncate"] = "drop"
    """Above C: `drop` the response, or `truncate` w to C."""
    error_probability: float = 0.05
    """Error-token metric: probability below which a token is suspect (our number)."""
    error_window: int = 16
    """Error-token metric: tokens that make a neighbourhood (our number)."""
    error_cluster: int = 4
    """Error-token metric: suspects in a neighbourhood that make a cluster (our number)."""


class TBPO(PolicyLoss):
    """Trust bands on whole responses."""

    name = "tbpo"
    level = "sequence"
    owns_mismatch = True
    drops_by_logp = True
    Knobs = TBPOKnobs

    def check(self) -> str | None:
        k = self.knobs
        for name in ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high"):
            if getattr(k, name) < 0:
                return f"{name}={getattr(k, name)} must not be negative"
        for name in ("band_mode", "mismatch_mode"):
            if getattr(k, name) not in ("drop", "truncate"):
                return f"{name}={getattr(k, name)!r} is neither drop nor truncate"
        if k.seq_tis_imp_ratio_cap <= 0:
            return f"seq_tis_imp_ratio_cap={k.seq_tis_imp_ratio_cap} must be above 0"
        return None

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        k = self.knobs
        s, token = sequence_ratio(t)
        adv = t.mean(t.adv)
        above = torch.where(adv > 0, s > 1 + k.seq_clip_ratio_high, (adv < 0) & (s > 1 + k.neg_seq_clip_ratio_high))
        below = (adv < 0) & (s < 1 - k.neg_seq_clip_ratio_low)
        mismatch = safe_exp(t.mean(t.lam))
        kept = torch.ones_like(above)
        if k.mismatch_mode == "drop":
            kept = kept & (mismatch <= k.seq_tis_imp_ratio_cap)
        weight = mismatch.clamp(max=k.seq_tis_imp_ratio_cap)
        if k.band_mode == "drop":
            kept = kept & ~(above | below)
        else:
            high = torch.where(adv > 0, 1 + k.seq_clip_ratio_high, 1 + k.neg_seq_clip_ratio_high)
            weight = weight * torch.where(above, high, torch.where(below, 1 - k.neg_seq_clip_ratio_low, s)) / s
        inside = t.mean(t.delta.detach()).abs() <= LOG_RATIO_LIMIT
        a, u = t.seg.spread(adv), t.seg.spread(weight)
        return Surrogate(
            ell=-u * token * a,
            slope=torch.where(t.seg.spread(inside), -u * t.seg.spread(s) * a, 0.0),
            keep=t.seg.spread(kept),
            clipped_high=t.seg.spread(above & (adv > 0)),
            clipped_low=t.seg.spread(below),
            clipped_dual=t.seg.spread(above & (adv < 0)),
            ratio=t.seg.spread(s),
            lines=(1 - k.neg_seq_clip_ratio_low, 1 + k.seq_clip_ratio_high),
        )

    def record(self, m: Metrics, t: Terms, s: Surrogate) -> None:
        k = self.knobs
        ratio, _ = sequence_ratio(t)
        counted, adv = t.has(t.live), t.mean(t.adv)
        dtype = t.old.dtype
        w = safe_exp(t.mean(t.lam))
        dropped = counted & ~t.has(t.live & s.keep)
        above = torch.where(adv > 0, ratio > 1 + k.seq_clip_ratio_high, ratio > 1 + k.neg_seq_clip_ratio_high)
        values = {
            "tbpo/dropped_frac": dropped.to(dtype),
            "tbpo/mismatch_ratio_mean": w,
            "tbpo/mismatch_over_cap_frac": (w > k.seq_tis_imp_ratio_cap).to(dtype),
        }
        m.means("tbpo", values, counted)
        m.means("tbpo:positive", {"tbpo/positive_above_frac": above.to(dtype)}, counted & (adv > 0))
        below = (ratio < 1 - k.neg_seq_clip_ratio_low).to(dtype)
        m.means(
            "tbpo:negative",
            {"tbpo/negative_above_frac": above.to(dtype), "tbpo/negative_below_frac": below},
            counted & (adv < 0),
        )
        record_sequence_ratio(m, t, ratio, "tbpo")
        found = error_tokens(t, probability=k.error_probability, window=k.error_window, cluster=k.error_cluster)
        m.means("tbpo:errors", {"tbpo/error_token_frac": found.to(dtype)}, t.live)

    def advice(self, m: Metrics, mini_step: int) -> str | None:
        return band_advice(m, mini_step)
