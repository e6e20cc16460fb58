"""What the audit records tell: how far the trainer's numbers are from the sampler's, and which encoding survives that.

The trainer's activations of the audited tokens are rounded by the trainer itself and compared with what the sampler
rounded to. Per site: how often the codes differ (flips), how many of the flips go to a neighbouring code (adjacency),
and sigma, the relative train-rollout noise that explains the flips: with the noise n of a value taken as
sigma * sqrt((z**2 + rms**2) / 2), a value at distance d from the next rounding threshold flips with probability
Q(d / n), and sigma is the one at which these add up to the flips that were seen.

Then each encoding is tried on the same rows: it is decoded with the trainer's activations and rounded under guidance,
and e is the share of values that come out other than the sampler's. In a closed loop the errors of a layer are noise
of the next: FP4 rounding turns errors at rate e into 0.144 * e of relative variance. If that is at most half of
sigma**2, the noise does not feed itself: e <= 3.5 * sigma**2. An encoding that loses no more than the site's whole
codes at the same bits loses nothing, whatever sigma is. So the rule: the smallest encoding with
e <= max(3.5 * sigma**2, e of lossless), at most 1 % of rows given up, and more than 99 % of flips adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.guidance import decode  # the function: importing its module would hide it
from tracekit.guidance.bits import pack_rows
from tracekit.guidance.check import check16
from tracekit.guidance.record import AuditRows, SiteRecord
from tracekit.guidance.schema import ENCODINGS, SiteSpec

STABLE = 3.5  # e <= STABLE * sigma**2
ADJACENT = 0.99
GIVEN_UP = 0.01
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_COUNTS = ("values", "flips", "adjacent", "scales", "scale_flips", "thresholds", "rows")
_BINS = 400  # of log(distance / noise at sigma 1), from 1e-6 to 1e4


def audit_tokens(traj_id: str, start: int, stop: int, every: int = 1024) -> list[int]:
    """The tokens of `[start, stop)` that are audited: one in `every`, by a hash of the id and the token."""
    from tracekit import _core

    return _core.audit_tokens(traj_id, start, stop, every)


def _ladder(codes: Tensor) -> Tensor:
    """Where a code stands among the 15 values, -7 to 7."""
    magnitude = (codes & 7).to(torch.int16)
    return torch.where(codes > 7, -magnitude, magnitude)


@dataclass(slots=True)
class SiteAudit:
    """Sums over the audited rows of one site."""

    bits: int
    values: int = 0
    flips: int = 0
    """Codes of the trainer's own rounding that are not the sampler's."""
    adjacent: int = 0
    scales: int = 0
    scale_flips: int = 0
    thresholds: int = 0
    """Flips under the sampler's scale: what sigma is fitted to."""
    errors: dict[str, int] = field(default_factory=dict)
    """Values that an encoding gets wrong."""
    rows: int = 0
    given_up: dict[str, int] = field(default_factory=dict)
    distances: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def merge(self, other: SiteAudit) -> None:
        """Adds the rows of another audit."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.errors, other.errors), (self.given_up, other.given_up)):
            for encoding, count in theirs.items():
                mine[encoding] = mine.get(encoding, 0) + count
        self.distances = self.distances + other.distances

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dictionaries."""
        plain = {name: getattr(self, name) for name in ("bits", *_COUNTS)}
        return plain | {
            "errors": dict(self.errors),
            "given_up": dict(self.given_up),
            "distances": self.distances.tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SiteAudit:
        return cls(**state | {"distances": np.array(state["distances"], np.int64)})

    @property
    def flip_rate(self) -> float:
        return self.flips / max(self.values, 1)

    @property
    def adjacency(self) -> float:
        """Share of flips to a neighbouring code; 1 without flips."""
        return self.adjacent / self.flips if self.flips else 1.0

    @property
    def scale_flip_rate(self) -> float:
        return self.scale_flips / max(self.scales, 1)

    @property
    def sigma(self) -> float:
        """Relative train-rollout noise; inf if no Gaussian noise explains so many flips."""
        if not self.thresholds:
            return 0.0
        ratio = np.exp(np.linspace(math.log(1e-6), math.log(1e4), _BINS))

        def expected(sigma: float) -> float:
            q = 0.5 * torch.special.erfc(torch.from_numpy(ratio / sigma / math.sqrt(2))).numpy()
            return float((self.distances * q).sum())

        lo, hi = 1e-7, 10.0
        if expected(hi) < self.thresholds:
            return math.inf
        for _ in range(40):
            mid = math.sqrt(lo * hi)
            lo, hi = (mid, hi) if expected(mid) < self.thresholds else (lo, mid)
        return math.sqrt(lo * hi)

    def error(self, encoding: str) -> float:
        return self.errors[encoding] / max(self.values, 1)

    def affordable(self) -> str:
        """The smallest encoding that the rule of this module allows."""
        if self.adjacency <= ADJACENT:
            return "lossless"
        limit = max(STABLE * self.sigma**2, self.error("lossless"))
        best = "lossless"
        for encoding in ENCODINGS:
            if encoding in self.errors and self.error(encoding) <= limit:
                if self.given_up.get(encoding, 0) <= GIVEN_UP * self.rows:
                    best = encoding
        return best


class Audit:
    """Adds up audited rows; `sites` has the sums. The learner calls `add` with its activations of those tokens."""

    def __init__(self) -> None:
        self.sites: dict[str, SiteAudit] = {}

    def add(self, x: Tensor, rows: AuditRows, *, bits: int = 1) -> None:
        """`x` `[n, (planes,) K]`: the trainer's activations of the rows' tokens as they enter the quantiser. `bits` are
        those that the site keeps of other tokens (for 0, 1 is tried)."""
        from tracekit import numerics

        site, bits = rows.site, bits or 1
        if x.numel() != rows.codes.size:
            raise DataError(f"site '{site.name}': x is {tuple(x.shape)}, the audited rows are {rows.codes.shape}")
        x = x.detach().reshape(rows.codes.shape)
        codes = torch.from_numpy(rows.codes.copy()).to(x.device)
        scales = torch.from_numpy(rows.scales.copy()).to(x.device)
        profile = numerics.profile_info(site.profile)
        g = torch.from_numpy(rows.token_scale).to(x.device)[:, None, None] if profile.has_global else None
        sums = self.sites.setdefault(site.name, SiteAudit(bits))
        own = numerics.quantize(x, profile, global_scale=g)
        gap = (_ladder(own.codes) - _ladder(codes)).abs()
        sums.values += gap.numel()
        sums.rows += gap.shape[0] * gap.shape[1]
        sums.flips += int((gap > 0).sum())
        sums.adjacent += int((gap == 1).sum())
        sums.scales += scales.numel()
        sums.scale_flips += int((own.scales != scales).sum())
        self._thresholds(sums, x.float(), codes, scales, g, site, profile)
        truth = numerics.dequantize(codes, scales, profile, g, torch.float32)
        sigma = sums.sigma
        noise = max(sigma, 1e-4) if sigma < 1 else 0.3
        for encoding in ENCODINGS:
            if encoding == "rm15" and bits != 1 or encoding != "lossless" and site.two_branches:
                continue
            record = encode(rows, encoding, bits)
            low, got, ok = decode(x, record, sigma=noise)
            out = numerics.guided_round(x.float(), low, got, bits=bits, profile=profile, global_scale=g)
            sums.errors[encoding] = sums.errors.get(encoding, 0) + int((out != truth).sum())
            sums.given_up[encoding] = sums.given_up.get(encoding, 0) + int((~ok).sum())

    @staticmethod
    def _thresholds(sums: SiteAudit, x, codes, scales, g, site: SiteSpec, profile) -> None:
        """Flips under the sampler's scale, and how far every value is from the next threshold."""
        pad = site.scale_row * site.block - site.width
        blocks = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (site.scale_row, site.block))
        z = profile.normalise(blocks, scales, profile.scale_value(scales), g)
        z = torch.nan_to_num(z, nan=6.0).flatten(-2)[..., : site.width]
        magnitude = z.abs().clamp(max=16)
        bounds = torch.tensor(_BOUNDS, device=x.device)
        mine = torch.bucketize(magnitude, bounds).to(torch.int16)
        mine = torch.where(z < 0, -mine, mine)
        sums.thresholds += int((mine != _ladder(codes)).sum())
        noise = ((z.square() + z.square().mean(-1, keepdim=True)) / 2).sqrt().clamp(min=1e-9)
        ratio = ((magnitude[..., None] - bounds).abs().amin(-1) / noise).clamp(1e-6, 1e4)
        place = (ratio.log() - math.log(1e-6)) / (math.log(1e4) - math.log(1e-6)) * (_BINS - 1)
        sums.distances += torch.bincount(place.round().long().flatten(), minlength=_BINS).cpu().numpy()


def encode(rows: AuditRows, encoding: str, bits: int) -> SiteRecord:
    """The record that a writer with this encoding would have kept of the rows."""
    site = replace(rows.site, encoding=encoding, bits=bits)
    low = rows.codes & ((1 << bits) - 1)
    packed = pack_rows(low, bits)
    scales, checks = rows.scales, None
    if site.n_checks:
        checks = [check16(torch.from_numpy(scales.copy()))]
        if encoding == "rm15":
            checks.append(check16(torch.from_numpy(packed)))
            packed = pack_rows(_leaders(low), 1)
        checks = torch.stack(checks, -1).numpy().astype("<u2")
        scales = scales & ((1 << site.scale_bits) - 1)
    token_scale = rows.token_scale if site.global_scale is None else None
    span = range(len(rows.tokens))
    return SiteRecord(site, span, packed, scales, token_scale, site.global_scale, checks)


def _leaders(bits: np.ndarray) -> np.ndarray:
    """Each 32 one-bit codes less the affine function that agrees with them at positions 0, 1, 2, 4, 8 and 16."""
    width = bits.shape[-1]
    words = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -width % 32)])
    words = words.reshape(*bits.shape[:-1], -1, 32)
    words = words ^ words[..., :1]
    out = words.copy()
    for i in range(5):
        out ^= words[..., 1 << i, None] & (np.arange(32, dtype=np.uint8) >> i & 1)
    return out.reshape(*bits.shape[:-1], -1)[..., :width]


def audit(
    reader: Any, activations: Callable[[str, str, np.ndarray], Any], ids: Iterable[str] | None = None
) -> dict[str, SiteAudit]:
    """Audits the trajectories `ids` (all by default) of a reader.

    `activations(traj_id, site, tokens)` gives the trainer's `[n, (planes,) K]` at those tokens of the trajectory, or
    None where it has none. A learner that has its activations at hand calls `Audit.add` itself.
    """
    sums = Audit()
    for traj_id in reader.ids() if ids is None else ids:
        for name, rows in reader.audit(traj_id).items():
            x = activations(traj_id, name, rows.tokens)
            if x is not None:
                sums.add(torch.as_tensor(x), rows, bits=reader.site(name).bits)
    return sums.sites
