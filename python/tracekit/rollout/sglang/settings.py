"""What the client tells the plugin, through the environment of the engine's processes."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

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
    kv_pool: Literal["bf16", "packed"] = "bf16"
    """What the cache holds of rounded K and V: their values, or codes and scales (nvfp4-exact)."""
    static_scales: dict[str, float] = field(default_factory=dict)
    """Encode scale of every rounded site, recorded or not, for profiles that have one."""
    sites: list[SiteSpec] = field(default_factory=list)
    """Sites to record."""
    encoding: str = "lossless"
    user: dict[str, Any] = field(default_factory=dict)
    """Metadata of the datasets."""
    keep_activations: bool = False
    """Also keep each request's unrounded activations, in `folder/activations`, to check records against: for tests."""
    part: int = 0
    """Number of this process among those that record, where tensor parallelism has several."""
    parts: int = 1
    agreed: str = ""
    """In a rank's share the digest of the whole."""

    def __post_init__(self) -> None:
        if self.kv_pool not in ("bf16", "packed"):
            raise ConfigError(f'kv_pool must be "bf16" or "packed", not {self.kv_pool!r}')

    @property
    def schema(self) -> GuidanceSchema:
        """The datasets' schema; its metadata say under which settings the rows were made."""
        return GuidanceSchema(sites=self.sites, user={**self.user, "engine": self.digest})

    @property
    def digest(self) -> str:
        """Names the settings: an engine's records carry it, so that a client sees whether they agree."""
        return self.agreed or hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def share(self, rank: int, ranks: int) -> Settings:
        """What tensor-parallel rank `rank` of `ranks` records: rank 0 the experts' inputs, which all ranks have alike,
        and each its heads of K and V; where several have the same head, the first of them."""
        if ranks == 1:
            return self
        sites, split = [], [site for site in self.sites if site.name.endswith((".k", ".v"))]
        copies = max(ranks // min((site.planes for site in split), default=1), 1)
        for site in self.sites:
            if site not in split:
                sites += [site] if rank == 0 else []
            elif rank % copies == 0:
                heads = max(site.planes // ranks, 1)
                sites.append(replace(site, planes=heads, first_plane=rank // copies * heads, all_planes=site.planes))
        parts = ranks // copies if split else 1
        return replace(self, sites=sites, part=rank // copies, parts=parts, agreed=self.digest)

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
