"""Records of every encoding on the device: decoded there with the trainer's activations, and rounded under them.

A record is uploaded once, packed as it is stored. `decode_on_device` and `guided_from_record` then run without a wait
for the device: batched tensor operations that search in all rows, because asking how many rows failed their check
would be such a wait. Up to the order of near ties in floating point, which the row check arbitrates, the results are
those of `tracekit.guidance.decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.guidance.complete import complete, global_scale_of
from tracekit.guidance.record import BatchRecord, SiteRecord
from tracekit.guidance.schema import SiteSpec
from tracekit.kernels.guided_qdq import guided_qdq
from tracekit.kernels.low_bits import pack_low_bits, unpack_low_bits


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A site's rows for T tokens on a device: `codes` u8 [T, planes, ceil(K*bits/8)] (rm15: the coset leaders; None
    for bits = 0), `scales` u8 [T, planes, nb] (the stored bits of each), `checks` int32 [T * planes, 1 or 2] or None,
    `global_scale` fp32 [T * planes, 1].
    """

    site: SiteSpec
    codes: Tensor | None
    scales: Tensor
    checks: Tensor | None
    global_scale: Tensor

    @classmethod
    def of(cls, record: SiteRecord | BatchRecord, device: torch.device | str) -> DeviceRecord:
        """Upload what a reader gave."""
        site, device = record.site, torch.device(device)
        if site is None:
            raise DataError("this record has no site: read it with GuidanceReader.read or read_batch")

        def upload(a: np.ndarray) -> Tensor:
            host = torch.from_numpy(np.array(a))
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

        codes = None if record.codes is None else upload(record.codes)
        if codes is not None and codes.shape[-1] != -(-site.width * site.bits // 8):
            codes = pack_low_bits(codes, site.bits)
        scales = upload(record.scales)
        rows = scales.shape[0] * scales.shape[1]
        checks = None if record.checks is None else upload(record.checks.astype(np.int32)).reshape(rows, -1)
        return cls(site, codes, scales, checks, global_scale_of(record, site, rows, device))


@torch.no_grad()
def decode_on_device(
    x: Tensor, record: DeviceRecord, *, sigma: float = 0.01, stats: dict[str, int] | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The sampler's rounding at x [T, K] or [T, planes, K], the activations that enter the quantiser.

    Returns packed low bits u8 [T, (planes,) ceil(K*bits/8)] (None for bits = 0), scales u8 [T, (planes,) nb] and
    `row_ok` bool [T, (planes)]. Scales of a row that is not ok are the profile's `missing_scale`. `stats` is added to
    as `tracekit.guidance.decode` does it, which waits for the device.
    """
    site, lead = record.site, x.shape[:-1]
    rows = record.scales.shape[0] * record.scales.shape[1]
    if x.shape[-1] != site.width or x.numel() != rows * site.width:
        raise DataError(f"site '{site.name}': x is {tuple(x.shape)}, its record has rows {tuple(record.scales.shape)}")
    packed, scales = record.codes, record.scales.reshape(rows, -1)
    ok = torch.ones(rows, dtype=torch.bool, device=x.device)
    found = torch.zeros_like(ok)
    if site.scale_bits < 8:
        leaders = None
        if site.encoding == "rm15":
            leaders = unpack_low_bits(packed.reshape(rows, -1), 1, site.width)
        flat = x.reshape(rows, site.width).float()
        bits, scales, ok, found = complete(flat, leaders, scales, record.checks, record.global_scale, site, sigma)
        if site.encoding == "rm15":
            packed = pack_low_bits(bits, 1)
    if stats is not None:
        for key, value in (("rows", rows), ("rows_recovered", found.sum()), ("rows_fallback", (~ok).sum())):
            stats[key] = stats.get(key, 0) + int(value)
    return (
        None if packed is None else packed.reshape(*lead, -1),
        scales.reshape(*lead, -1),
        ok.reshape(lead),
    )


def guided_from_record(
    x: Tensor, record: DeviceRecord, *, rounding: str = "bracket", sigma: float = 0.01
) -> tuple[Tensor, Tensor]:
    """(guided quantise-dequantise of x under its record, `row_ok`), both as above; gradient 1 with respect to x."""
    low, scales, ok = decode_on_device(x.detach(), record, sigma=sigma)
    g = record.global_scale.reshape(*x.shape[:-1], 1)
    site = record.site
    values = guided_qdq(x, low, scales, bits=site.bits, profile=site.profile, global_scale=g, rounding=rounding)
    return values, ok
