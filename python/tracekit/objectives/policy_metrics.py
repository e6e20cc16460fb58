"""Metrics of the update and of the correction: `policy/*`, `correction/*`."""

import torch
from torch import Tensor

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.losses.base import Surrogate
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import Terms, safe_exp


def record_policy(m: Metrics, t: Terms, s: Surrogate, active: Tensor) -> None:
    """Ratio before clipping, clip shares (sign-aware and any-sign), KL of the update, advantages, entropy."""
    live = t.live
    delta = t.delta.detach()
    r = safe_exp(delta)
    ratio = r if s.ratio is None else s.ratio
    dtype = t.old.dtype
    none = torch.zeros_like(live)
    low, high, dual = (none if x is None else x for x in (s.clipped_low, s.clipped_high, s.clipped_dual))
    values = {
        "policy/ratio_mean": r,
        "policy/approx_kl": -delta,
        "policy/kl_k3": r - 1 - delta,
        "policy/clip_frac": (low | high | dual).to(dtype),
        "policy/clip_frac_low": low.to(dtype),
        "policy/clip_frac_high": high.to(dtype),
        "policy/clip_frac_dual": dual.to(dtype),
        "policy/active_frac": active.to(dtype),
        "policy/advantage_mean": t.adv,
        "policy/advantage_abs_mean": t.adv.abs(),
    }
    if s.lines:
        inside = torch.ones_like(live)
        for line, below in zip(s.lines, (True, False), strict=False):
            inside = inside & ((ratio >= line) if below else (ratio <= line))
        values["policy/ratio_out_of_band_frac"] = (~inside).to(dtype)
    if t.batch.entropy is not None:
        values["policy/entropy"] = torch.where(live, t.batch.flat(t.batch.entropy).detach().to(dtype), 0.0)
    m.means("policy", values, live)
    m.maxima("policy", {"policy/ratio_max": r, "-policy/ratio_min": -r}, live)


def record_correction(m: Metrics, t: Terms, w: Weights, keep: Tensor) -> None:
    """Weights after the cap, the share the cap changed, and what rejection took out (tokens and responses)."""
    live = t.live
    dtype = t.old.dtype
    u = torch.where(live & keep, w.weight, 0.0)
    values = {
        "w": u,
        "ww": u * u,
        "dropped": (~keep).to(dtype),
        "capped": torch.zeros_like(u) if w.capped is None else w.capped.to(dtype),
        "small": (u < 0.1).to(dtype),
    }
    m.token_sums("weights", values, live)
    for name, column in {
        "weight_mean": "w",
        "drop_frac": "dropped",
        "clip_frac": "capped",
        "weight_below_0.1_frac": "small",
    }.items():
        m.recipe(f"correction/{name}", "mean", f"weights:{column}", "weights:n")
    m.recipe("correction/weight_std", "std", "weights:w", "weights:ww", "weights:n")
    m.recipe("correction/ess", "ess", "weights:w", "weights:ww", "weights:n")
    m.maxima("weights", {"correction/weight_max": u, "-correction/weight_min": -u}, live)
    if w.raw is not None:
        m.means("raw_weights", {"correction/weight_raw_mean": w.raw}, live)
        m.maxima("raw_weights", {"correction/weight_raw_max": w.raw}, live)
    counted = t.seg.sum(live.to(dtype)) > 0
    gone = counted & ~t.has(live & keep)
    m.means("kept", {"correction/response_drop_frac": gone.to(dtype)}, counted)


def record_input(m: Metrics, t: Terms, active: Tensor, loss: Tensor) -> None:
    """Loss, counts, and what the rules for non-finite input took out."""
    values = {
        "loss": loss,
        "tokens": t.valid.sum(),
        "responses": (t.length > 0).sum(),
        "nonfinite": t.nonfinite,
        "active": active.sum(),
        "mu_dropped": (t.masked & ~t.valid).sum(),
        "masked": t.masked.sum(),
        "mu_responses": (t.seg.sum((t.masked & ~t.valid).to(t.old.dtype)) > 0).sum(),
        "all_responses": (t.seg.sum(t.masked.to(t.old.dtype)) > 0).sum(),
    }
    m.sums("input", values)
    m.recipe("policy/loss", "sum", "input:loss")
    m.recipe("policy/tokens", "sum", "input:tokens")
    m.recipe("policy/responses", "sum", "input:responses")
    m.recipe("policy/nonfinite_tokens", "sum", "input:nonfinite")
    m.recipe("policy/all_rejected", "is_zero", "input:active")
    m.recipe("mismatch/mu_nonfinite_frac", "mean", "input:mu_dropped", "input:masked")
    m.recipe("mismatch/seq_nan_frac", "mean", "input:mu_responses", "input:all_responses")
