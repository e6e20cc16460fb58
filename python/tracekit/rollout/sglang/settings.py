"""What the client tells the plugin, through the environment of the engine's processes."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracekit.errors import ConfigError
from tracekit.guidance import GuidanceSchema, SiteSpec

FILE = "tracekit.json"
"""Settings beside the model that they are for."""
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
        """The datasets' schema; its metadata say under which settings the rows were made."""
        return GuidanceSchema(sites=self.sites, user={**self.user, "engine": self.digest})

    @property
    def digest(self) -> str:
        """Names the settings: an engine's records carry it, so that a client sees whether they agree."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: Path | str) -> None:
        """Write the settings as JSON, for `tracekit serve`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Settings:
        """The settings in `path`. Raises ConfigError when it can't be read or holds something else."""
        try:
            return cls._parse(Path(path).read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}: not the settings of an engine ({error}); see docs/sglang.md") from None

    def to_environment(self) -> dict[str, str]:
        """The variable to start an engine with."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings | None:
        """The settings of this process, None where the plugin has nothing to do."""
        text = os.environ.get(VARIABLE)
        return cls._parse(text) if text else None

    @classmethod
    def _parse(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "sites": [SiteSpec(**site) for site in values["sites"]]})
