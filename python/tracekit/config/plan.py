"""What a configuration quantises, layer by layer, and how many bytes of guidance that makes. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracekit.config.schema import Config
from tracekit.errors import ConfigError

BLOCK = {"nvfp4-exact": 16, "mxfp4-rceil": 32, "kv-mx16": 16}
"""Values that share one scale byte, per profile."""

W8A8 = frozenset({"int8", "fp8-e4m3"})
"""Profiles of eight bits with a scale a row: rounded, never recorded."""

TOKEN_SCALED = frozenset({"nvfp4-exact"})
"""Profiles with a global scale, which `quant.global_scale = "token"` records for every token."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place of one layer where activations are quantised.

    A token's record has `planes` rows (one a head for k and v) of `width` values, `block` of which share a scale.
    `bits` is 0 where nothing is recorded.
    """

    name: str
    profile: str
    planes: int
    width: int
    block: int
    bits: int
    scales: bool
    global_scale_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Raw size of a token's record: rows padded to whole bytes, one byte a scale, no compression."""
        codes = (self.width * self.bits + 7) // 8
        scales = -(-self.width // self.block) if self.scales else 0
        return self.planes * (codes + scales + (self.global_scale_bytes if self.scales else 0))


def guided_layers(config: Config) -> list[int]:
    """The layers that `guidance.layers` names. Raises ConfigError outside its grammar."""
    spec, n_layers = config.guidance.layers, config.model.n_layers
    if spec == "all":
        return list(range(n_layers))
    if spec == "last_half":
        return list(range(n_layers // 2, n_layers))
    count = re.fullmatch(r"last:(\d+)", spec)
    if not count:
        raise ConfigError(f"guidance.layers = {spec!r}: expected all, last_half or last:N")
    if not 1 <= int(count[1]) <= n_layers:
        raise ConfigError(f"guidance.layers = {spec!r}: N must be 1 to {n_layers}, the model's layers")
    return list(range(n_layers - int(count[1]), n_layers))


def plan(config: Config) -> list[Site]:
    """Every quantised activation site, layer by layer, recorded or not."""
    model, layers = config.model, set(guided_layers(config))
    shapes = {
        "moe_input": (config.quant.experts, 1, model.dim),
        "moe_hidden": (config.quant.experts, 1, model.moe_hidden),
        "k": (config.quant.kv, model.n_kv_heads, model.head_dim),
        "v": (config.quant.kv, model.n_kv_heads, model.head_dim),
    }
    sites = []
    for layer in range(model.n_layers):
        for short, (profile, planes, width) in shapes.items():
            if profile == "none":
                continue
            wanted = config.guidance.bits > 0 and layer in layers and short in config.guidance.sites
            recorded = wanted and profile not in W8A8
            token_scale = config.quant.global_scale == "token" and profile in TOKEN_SCALED
            sites.append(
                Site(
                    name=f"layers.{layer}.{short}",
                    profile=profile,
                    planes=planes,
                    width=width,
                    block=BLOCK.get(profile, width),
                    bits=config.guidance.bits if recorded else 0,
                    scales=recorded,
                    global_scale_bytes=4 if token_scale else 0,
                )
            )
    return sites


def guided_sites(config: Config) -> list[Site]:
    """The sites that guidance records: those of `guidance.sites` and `guidance.layers` that are quantised at all."""
    return [site for site in plan(config) if site.scales]
