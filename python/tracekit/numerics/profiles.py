"""Quantiser profiles by name, because "NVFP4" alone names seven different chains."""

from __future__ import annotations

from tracekit.errors import ConfigError
from tracekit.numerics.base import FLT_MAX, Profile
from tracekit.numerics.eight_bit import E4M3, Int
from tracekit.numerics.mx import MX
from tracekit.numerics.nvfp4 import (
    FourOverSix,
    NVFP4CompressedTensors,
    NVFP4Exact,
    NVFP4Fast,
    NVFP4ModelOpt,
    NVFP4TorchAO,
)

__all__ = ["FLT_MAX", "PROFILES", "Profile", "profile_info"]

_NVFP4 = dict(block=16, scale_format="e4m3", has_global=True)
_MXFP4 = dict(block=32, scale_format="e8m0", has_global=False)
_ROW = dict(block=0, scale_format="fp32", has_global=False)

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        NVFP4Exact("nvfp4-exact", **_NVFP4),
        NVFP4Fast("nvfp4-fast", **_NVFP4),
        FourOverSix("nvfp4-4over6", **_NVFP4),
        FourOverSix("nvfp4-4over6-mae", **_NVFP4, metric="mae"),
        FourOverSix("nvfp4-4over6-256", **_NVFP4, scale_range=1536.0),
        FourOverSix("nvfp4-4over6-mae-256", **_NVFP4, scale_range=1536.0, metric="mae"),
        NVFP4ModelOpt("nvfp4-modelopt", **_NVFP4, keeps_minus_zero=False, decode_global=True),
        NVFP4TorchAO("nvfp4-torchao", **_NVFP4, decode_global=True),
        NVFP4CompressedTensors("nvfp4-ct", **_NVFP4, keeps_minus_zero=False),
        MX("mxfp4-rceil", **_MXFP4),
        MX("mxfp4-floor", **_MXFP4, rule="floor"),
        MX("mxfp4-even", **_MXFP4, rule="even"),
        # SGLang's block-16 FP4 pool: exponent of max(amax / 6, 1e-10) rounded up, thresholds half up.
        MX(
            "kv-mx16",
            block=16,
            scale_format="e8m0",
            has_global=False,
            ties="away",
            keeps_minus_zero=False,
            min_scale=94,
        ),
        Int("int8", **_ROW),
        Int("int8-rtz", **_ROW, truncate=True),
        Int("int4-g128", block=128, scale_format="fp32", has_global=False, width=4),
        E4M3("fp8-e4m3", **_ROW),
        E4M3("fp8-e4m3-rtz", **_ROW, truncate=True),
        E4M3("mxfp8", **_MXFP4),
    )
}


def profile_info(profile: str | Profile) -> Profile:
    """The profile of that name; ConfigError if there is none."""
    if isinstance(profile, Profile):
        return profile
    try:
        return PROFILES[profile]
    except KeyError:
        known = ", ".join(PROFILES)
        raise ConfigError(f"no quantiser profile is called {profile!r}\nknown: {known}") from None
