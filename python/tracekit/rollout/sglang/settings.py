"""What the client tells the plugin, through the environment of the engine's processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from tracekit.guidance import GuidanceSchema, SiteSpec

VARIABLE = "TRACEKIT_SGLANG"
"""Environment variable that holds the settings; without it the plugin does nothing."""


@dataclass(kw_only=True, slots=True)
class Settings:
    """Which values the engine rounds, and what of it is recorded."""

    folder: str
    """Where the datasets go, one folder a step: a request whose id is `step/trajectory` is written to `folder/step`."""
    experts: str | None = None
    """Profile of the routed experts' activations (both GEMMs); None leaves them alone. Weights arrive rounded."""
    kv: str | None = None
    """Profile of K (after RoPE) and V, rounded before attention and cache see them; None leaves them alone."""
    static_scales: dict[str, float] = field(default_factory=dict)
    """Encode scale of every rounded site, recorded or not, for profiles that have one."""
    sites: list[SiteSpec] = field(default_factory=list)
    """Sites to record."""
    encoding: str = "lossless"
    user: dict[str, Any] = field(default_factory=dict)
    """Metadata of the datasets."""
    keep_activations: bool = False
    """Also keep each request's unrounded activations, in `folder/activations`, to check records against: for tests."""

    @property
    def schema(self) -> GuidanceSchema:
        """The datasets' schema."""
        return GuidanceSchema(sites=self.sites, user=self.user)

    def to_environment(self) -> dict[str, str]:
        """The variable to start an engine with."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings | None:
        """The settings of this process, None where the plugin has nothing to do."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        return cls(**{**values, "sites": [SiteSpec(**site) for site in values["sites"]]})
