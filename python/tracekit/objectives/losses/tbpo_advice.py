"""TBPO's bands against what a run shows: warn when they drop almost everything, and say which would not."""

import torch
from torch import Tensor

from tracekit.objectives.metrics import Metrics

ALMOST_ALL = 0.9
"""Share of dropped responses that is worth a warning."""
FIRST_STEP_TOLERANCE = 1e-6
"""Largest |s - 1| of a first mini-step: logp and logp_old come from the same weights."""
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def _finite(m: Metrics, name: str) -> Tensor:
    values = m.samples().get(f"tbpo/{name}", torch.empty(0))
    return values[torch.isfinite(values)]


def suggest_bands(m: Metrics, keep: float = 0.85) -> dict[str, float]:
    """Bands that would keep about this share of the responses measured in `m` (merged metrics of a mini-step ≥ 1).

    The share of GSPO's published runs that is clipped is about 0.15. Such bands are tuned numbers: report them.
    """
    bands = {}
    positive, negative = _finite(m, "seq_ratio_positive"), _finite(m, "seq_ratio_negative")
    if positive.numel():
        bands["seq_clip_ratio_high"] = max(float(positive.quantile(keep)) - 1, 0.0)
    if negative.numel():
        tail = (1 - keep) / 2
        bands["neg_seq_clip_ratio_low"] = max(1 - float(negative.quantile(tail)), 0.0)
        bands["neg_seq_clip_ratio_high"] = max(float(negative.quantile(1 - tail)) - 1, 0.0)
    return bands


def band_advice(m: Metrics, mini_step: int) -> str | None:
    """What to tell a person after a mini-step: 0 must have s = 1, later ones should keep most responses."""
    values = m.finalize()
    if mini_step == 0:
        off = max(values.get("tbpo/seq_ratio_max", 1.0) - 1, 1 - values.get("tbpo/seq_ratio_min", 1.0))
        if off > FIRST_STEP_TOLERANCE:
            return (
                f"tbpo: at the first mini-step the response ratio is off 1 by up to {off:.2g}; with bands of 1e-4 that "
                "matters\ncompute logp_old by the same path as logp (same kernels, chunks, guidance)"
            )
        return None
    dropped = values.get("tbpo/dropped_frac", 0.0)
    if dropped <= ALMOST_ALL:
        return None
    lines = [f"tbpo: mini-step {mini_step} dropped {dropped:.0%} of the responses; the bands are too narrow here"]
    for sign in ("positive", "negative"):
        s = _finite(m, f"seq_ratio_{sign}")
        if s.numel():
            shown = ", ".join(f"{q:g}: {float(s.quantile(q)) - 1:+.2g}" for q in _QUANTILES)
            lines.append(f"quantiles of s - 1, {sign} responses: {shown}")
    bands = ", ".join(f"{k}={v:.2g}" for k, v in suggest_bands(m).items())
    if len(lines) < 3 and bands:
        lines.append(f"bands that keep about 85%: {bands}")
    elif bands:
        lines[0] += f"; about 85% stay with {bands}"
    return "\n".join(lines)
