"""Which record steers which rounding: the context that the guided modules read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tracekit import numerics
from tracekit.guidance import BatchRecord, decode
from tracekit.learner.audits import StepAudit
from tracekit.learner.gaps import SiteGaps

if TYPE_CHECKING:
    from tracekit.kernels import DeviceRecord

_active = threading.local()


@dataclass(kw_only=True, slots=True)
class SiteRecord:
    """The sampler's rounding at one site, for the tokens of one microbatch in their flattened order.

    `codes` u8 [T, planes, K] low bits of each code (None: scales only), or packed along the row as they are stored;
    `scales` u8 [T, planes, K/block], the format's NaN for a token without a record; `global_scale` f32, a number or
    [T, 1, 1].
    """

    codes: torch.Tensor | None
    scales: torch.Tensor
    bits: int
    global_scale: torch.Tensor
    packed: bool = False

    def round(self, x: torch.Tensor, profile: str, rounding: str) -> torch.Tensor:
        """`x` [T, planes, K] rounded under the record, gradient straight through."""
        rule = dict(bits=self.bits, profile=profile, global_scale=self.global_scale, rounding=rounding)
        if not self.packed:
            return numerics.guided_round(x, self.codes, self.scales, **rule)
        from tracekit.kernels import guided_qdq  # brings Triton with it, which a CPU does not need

        return guided_qdq(x, self.codes, self.scales, **rule)

    def low_bits(self, width: int) -> torch.Tensor | None:
        """u8 [T, planes, width]: low bits, one byte an element; None for scales only."""
        if not self.packed or self.codes is None:
            return self.codes
        from tracekit.kernels import unpack_low_bits

        return unpack_low_bits(self.codes, self.bits, width)


@dataclass(kw_only=True, slots=True)
class EncodedRecord:
    """A record whose codes or scales need the learner's own activations: encodings `compact`, `low2` and `rm15`.

    `stored` holds the rows of the tokens `at` int64 [N], out of `total` flattened tokens.
    """

    stored: BatchRecord
    at: torch.Tensor
    total: int
    global_scale: torch.Tensor

    @torch.no_grad()
    def decode(self, x: torch.Tensor, stats: dict[str, int] | None) -> SiteRecord:
        """The sampler's rounding, from `x` [T, planes, K]. A row that fails its check has no record; `stats` counts."""
        codes, scales, _ = decode(x.detach()[self.at], self.stored, stats=stats)
        return SiteRecord(
            codes=None if codes is None else spread(codes, self.at, self.total),
            scales=spread(scales, self.at, self.total),
            bits=self.stored.site.bits,
            global_scale=self.global_scale,
        )


@dataclass(kw_only=True, slots=True)
class DeviceSiteRecord:
    """A record of any encoding that a GPU holds as it is stored, and completes without the host.

    Tokens as in `EncodedRecord`.
    """

    stored: DeviceRecord
    at: torch.Tensor
    total: int
    global_scale: torch.Tensor

    @torch.no_grad()
    def decode(self, x: torch.Tensor, stats: dict[str, int] | None) -> SiteRecord:
        """As `EncodedRecord.decode`; the codes stay packed. Counting in `stats` waits for the device."""
        from tracekit.kernels import decode_on_device

        counted = stats if self.stored.checks is not None else None
        codes, scales, _ = decode_on_device(x.detach()[self.at], self.stored, stats=counted)
        return SiteRecord(
            codes=None if codes is None else spread(codes, self.at, self.total),
            scales=spread(scales, self.at, self.total),
            bits=self.stored.site.bits,
            global_scale=self.global_scale,
            packed=True,
        )


def spread(rows: torch.Tensor, at: torch.Tensor, total: int) -> torch.Tensor:
    """`rows` [N, ...] at their places `at` of [total, ...]; zeros elsewhere."""
    out = torch.zeros(total, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    out[at] = rows
    return out


@dataclass(kw_only=True, slots=True)
class Guide:
    """Rounding of one microbatch: profiles, static scales, records and routes."""

    profiles: dict[str, str]
    """Site kind (`moe_input`, `moe_hidden`, `k`, `v`) to profile; a kind that is absent is not rounded."""
    static_scales: dict[str, torch.Tensor] | None
    """Encode scale of each site; None takes one from each token."""
    rounding: str = "bracket"
    records: dict[str, SiteRecord | EncodedRecord | DeviceSiteRecord] = field(default_factory=dict)
    routes: torch.Tensor | None = None
    """Expert ids to replay, [layers, T, top_k] int64; None routes anew."""
    real: torch.Tensor | None = None
    """bool [T]: tokens that are not padding, for calibration (rows that are sorted by expert are taken whole)."""
    amax: dict[str, torch.Tensor] | None = None
    """Where calibration collects the largest magnitude of each site; None outside calibration."""
    flips: dict[str, torch.Tensor] | None = None
    """Where the share of values that the record moved off nearest rounding is collected; None does not measure."""
    decoded: dict[str, int] | None = None
    """Where rows that were decoded, repaired and given up are counted; None does not count."""
    gaps: SiteGaps | None = None
    """Where the distance between recorded and own rounding is collected; None does not measure."""
    audit: StepAudit | None = None
    """Where the activations of audited tokens are collected; None does not."""

    def global_scale(self, site: str, x: torch.Tensor, profile: str) -> torch.Tensor | None:
        """Encode scale for `x` [T, planes, K] at `site`: static, or one a token [T, 1, 1]; None without one."""
        if not numerics.profile_info(profile).has_global:
            return None
        if self.static_scales is not None:
            return self.static_scales[site]
        return numerics.global_scale_for(numerics.absolute_maximum(x.detach(), tuple(range(1, x.ndim)), keepdim=True))


@contextlib.contextmanager
def guided(guide: Guide | None) -> Iterator[None]:
    """Make `guide` the active one. Must span forward and backward: recomputation runs the forward again."""
    before = getattr(_active, "guide", None)
    _active.guide = guide
    try:
        yield
    finally:
        _active.guide = before


def current() -> Guide | None:
    """The active guide of this thread."""
    return getattr(_active, "guide", None)


def own_rounding(x: torch.Tensor, profile: str, scale: torch.Tensor | None) -> torch.Tensor:
    """`x` [T, planes, K] rounded to nearest under its own block scales, straight through; by a kernel on a GPU."""
    if x.device.type == "cuda" and numerics.profile_info(profile).bits == 4:
        from tracekit.kernels import fake_quantize

        return fake_quantize(x, profile, global_scale=scale)
    return numerics.fake_quantize(x, profile, global_scale=scale)


def quantize_site(site: str, x: torch.Tensor) -> torch.Tensor:
    """Round `x` [T, ..., K] as the sampler rounds at `site`; gradient straight through.

    With a record, TRACE's guided rounding (Algorithm 1); without, the profile's own round to nearest; unchanged where
    the site's kind has no profile.
    """
    guide = current()
    if guide is None:
        return x
    kind = site.rsplit(".", 1)[1]
    if guide.amax is not None:
        real = x if guide.real is None or len(x) != len(guide.real) else x[guide.real]
        seen = real.detach().abs().amax()
        guide.amax[site] = torch.maximum(guide.amax[site], seen) if site in guide.amax else seen
    profile = guide.profiles.get(kind)
    if profile is None:
        return x
    planes = x if x.ndim == 3 else x.unsqueeze(1)
    record = guide.records.get(site)
    if record is None:
        return own_rounding(planes, profile, guide.global_scale(site, planes, profile)).view_as(x)
    if guide.audit is not None:
        guide.audit.take(site, planes)
    if not isinstance(record, SiteRecord):
        record = record.decode(planes, guide.decoded)
    out = record.round(planes, profile, guide.rounding)
    if guide.flips is not None:
        own = own_rounding(planes, profile, guide.global_scale(site, planes, profile))
        recorded = (record.scales != 0).flatten(1).any(1)  # padding has no scale
        guide.flips[site] = (own.detach() != out.detach())[recorded].float().mean()
    if guide.gaps is not None:
        scale = guide.global_scale(site, planes, profile)
        guide.gaps.add(site, planes, out, record, profile=profile, scale=scale)
    return out.view_as(x)
