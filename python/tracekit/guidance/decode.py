"""Completing a record with the trainer's own activations: the encodings compact, low2 and rm15.

The trainer's activations differ from the sampler's by little. So the low bits of a scale, together with the trainer's
own unrounded scale, give the sampler's whole scale; and a word of one-bit codes is known up to a codeword of RM(1,5),
the likeliest of which, given the trainer's values, one Hadamard transform finds. A row whose check then fails is
searched for among its most doubtful choices; if that fails too it is given up, never guessed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.guidance.complete import complete, global_scale_of
from tracekit.guidance.record import BatchRecord, SiteRecord


def decode(
    x: Tensor, record: SiteRecord | BatchRecord, *, sigma: float = 0.01, stats: dict[str, int] | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The sampler's codes and scales of a record.

    `x` `[T, K]` or `[T, heads, K]` are the trainer's activations at the record's site and tokens, as they enter the
    quantiser. Returns `codes` u8 (x's shape, low `bits` of each code; None for bits = 0), `scales` u8
    `[T, (heads,) ceil(K/block)]` and `row_ok` bool `[T, (heads)]`. Rows that are not ok carry the profile's
    `missing_scale`: `guided_round` rounds them to nearest under the trainer's own scale.

    `sigma` is the relative train-rollout noise that rm15 expects. `stats` is added to: `rows`, `rows_recovered` (by
    search) and `rows_fallback`. No gradient flows.
    """
    site = record.site
    if site is None:
        raise DataError("this record has no site: read it with GuidanceReader.read or read_batch")
    raw = record.unpack() if isinstance(record, SiteRecord) and record.codes is not None else record.codes
    device = x.device
    shape = x.shape[:-1]
    scales = torch.as_tensor(np.ascontiguousarray(record.scales), device=device)
    if x.shape[-1] != site.width or math.prod(shape) != scales.shape[0] * scales.shape[1]:
        raise DataError(f"site '{site.name}': x is {tuple(x.shape)}, its record has rows {tuple(scales.shape[:2])}")
    scales = scales.reshape(-1, site.scale_row)
    codes = None if raw is None else torch.as_tensor(np.ascontiguousarray(raw), device=device).reshape(-1, site.width)
    ok = torch.ones(len(scales), dtype=torch.bool, device=device)
    found = torch.zeros_like(ok)
    if site.scale_bits < 8:
        rows = x.detach().reshape(-1, site.width).float()
        g = global_scale_of(record, site, len(scales), device)
        checks = torch.as_tensor(record.checks.astype(np.int32), device=device).reshape(len(rows), -1)
        codes, scales, ok, found = complete(rows, codes, scales, checks, g, site, sigma)
    if stats is not None:
        for key, value in (("rows", ok.numel()), ("rows_recovered", found.sum()), ("rows_fallback", (~ok).sum())):
            stats[key] = stats.get(key, 0) + int(value)
    return (
        None if codes is None else codes.reshape(*shape, site.width),
        scales.reshape(*shape, site.scale_row),
        ok.reshape(shape),
    )
