"""Static encode scales: one power of two a site, fixed for the run."""

from __future__ import annotations

import torch

from tracekit import numerics
from tracekit.config.schema import Config
from tracekit.errors import DataError
from tracekit.learner.guide import Guide


def profiles(config: Config) -> dict[str, str]:
    """Site kind to profile, for the kinds that are rounded at their sites: a product of codes rounds its own input."""
    out = {}
    if config.quant.experts != "none" and config.quant.forward != "hardware":
        out |= dict.fromkeys(("moe_input", "moe_hidden"), config.quant.experts)
    if config.quant.kv != "none":
        out |= dict.fromkeys(("k", "v"), config.quant.kv)
    return out


def calibration_guide() -> Guide:
    """A guide that rounds nothing and collects the largest magnitude of each site in `.amax`."""
    return Guide(profiles={}, static_scales=None, amax={})


def static_scales(amax: dict[str, torch.Tensor], headroom: float) -> dict[str, torch.Tensor]:
    """Largest power of two g with g * amax * headroom <= 2688, for each site.

    A power of two leaves the mantissas of values and scales alone, so that emulation in BF16 is exact.
    """
    for site, peak in amax.items():
        if not torch.isfinite(peak):
            raise DataError(
                f"calibration met a non-finite value at {site}: the warm start diverged, lower warmstart.lr"
            )
    return {site: numerics.global_scale_for(peak, headroom=headroom, power_of_two=True) for site, peak in amax.items()}
