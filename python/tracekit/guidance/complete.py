"""What completes a record's rows: batched tensor operations on the device that the trainer's activations are on."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.guidance.check import LIST, check16, search, shares
from tracekit.guidance.record import BatchRecord, SiteRecord
from tracekit.guidance.schema import SiteSpec

_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where the magnitude's code, and with it the low bit, changes
_SURE = 200.0


def complete(
    rows: Tensor, codes: Tensor | None, scales: Tensor, checks: Tensor, g: Tensor, site: SiteSpec, sigma: float
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """`decode` on tensors of one device, and on a GPU without a wait for it: activations fp32 `[R, K]`, low bits or
    coset leaders u8 `[R, K]` (used for rm15 only), stored scale bits u8 `[R, nb]`, checks int32 `[R, 1 or 2]`, encode
    scales fp32 `[R, 1]`. Returns (codes, scales, rows that hold, rows that a search repaired).
    """
    from tracekit.numerics import profile_info

    profile = profile_info(site.profile)
    scales, ok, found = _scales(rows, scales, checks[:, 0], g, site, profile)
    if site.encoding == "rm15":
        codes, good, searched = _syndromes(rows, codes, scales, checks[:, 1], g, site, profile, sigma)
        found = (found | searched) & ok & good
        ok = ok & good
    return codes, torch.where(ok[:, None], scales, profile.missing_scale).to(torch.uint8), ok, found


def _to_search(ok: Tensor) -> Tensor | slice | None:
    """Rows to search: those not ok. On a GPU all, because asking which would wait for the device; None for none."""
    if ok.device.type != "cpu":
        return slice(None)
    bad = (~ok).nonzero().squeeze(1)
    return bad if len(bad) else None


def global_scale_of(record: SiteRecord | BatchRecord, site: SiteSpec, rows: int, device: torch.device) -> Tensor:
    """Encode scales of a record's rows, fp32 `[rows, 1]`."""
    if record.token_scale is None:
        return torch.full((rows, 1), site.global_scale or 1.0, device=device)
    per_token = torch.as_tensor(np.ascontiguousarray(record.token_scale), device=device)
    return per_token.repeat_interleave(rows // max(len(per_token), 1))[:, None]


_EXPONENTS = {"rceil": -math.log2(6) + 127.5, "floor": 124.5, "even": math.log2(8 / 7) + 124.5}
"""What is added to log2 of a block's maximum: rounding to the nearest then gives the scale byte of the MX rule."""


def _position(amax: Tensor, g: Tensor, profile) -> Tensor:
    """Where the trainer's unrounded block scale lies on the axis of scale bytes, such that rounding it to the nearest
    whole number gives the trainer's own byte."""
    if profile.scale_format == "e4m3":
        v = amax / (6 * g) if profile.decode_global else amax * g / 6
        fraction, exponent = torch.frexp(v)  # v = fraction * 2**exponent, fraction in [1/2, 1)
        normal = 8.0 * (exponent + 6) + 8 * (2 * fraction - 1)
        position = torch.where(v < 2.0**-6, v * 512, normal)
    else:
        rule = getattr(profile, "rule", None)
        if rule not in _EXPONENTS:
            raise DataError(f"profile {profile.name} has no coset decoding: record its sites with encoding='lossless'")
        position = torch.log2(amax) + _EXPONENTS[rule]
    # Every chain has its own least scale, and its own for a block of zeros.
    own = profile.block_scale(amax, g if profile.has_global else None).float()
    return torch.minimum(torch.maximum(position, own - 0.5), own + 0.5)


def _scales(x, low, stored, g, site: SiteSpec, profile) -> tuple[Tensor, Tensor, Tensor]:
    """(whole scale bytes u8 `[R, nb]`, rows whose check holds, rows that a search repaired)."""
    pad = site.scale_row * site.block - site.width
    blocks = torch.nn.functional.pad(x, (0, pad)).view(len(x), site.scale_row, site.block)
    position = _position(blocks.abs().amax(-1), g, profile)
    step = float(1 << site.scale_bits)
    top = 126.0 if profile.scale_format == "e4m3" else 254.0
    low = low.float()
    position = torch.nan_to_num(position, nan=0.0, posinf=top, neginf=0.0).clamp(max=top)  # scales saturate
    ratio = (position - low) / step
    turns = ratio.round()

    def whole(n: Tensor) -> Tensor:
        c = low + step * n
        c = torch.where(c < 0, c + step, c)
        return torch.where(c > top, c - step, c)

    best = whole(turns)
    other = whole(turns + torch.where(ratio >= turns, 1.0, -1.0))
    best, other = best.to(torch.uint8), other.to(torch.uint8)
    wrong = check16(best) ^ stored
    ok = wrong == 0
    found = torch.zeros_like(ok)
    bad = _to_search(ok)
    if bad is not None:
        doubt = (ratio - turns).abs()[bad]
        pick = doubt.topk(min(LIST, site.scale_row), 1).indices
        change = shares(best[bad]) ^ shares(other[bad])
        hit, chosen = search(wrong[bad], change.gather(1, pick))
        hit = hit & ~ok[bad]
        use = torch.zeros_like(doubt, dtype=torch.bool).scatter(1, pick, chosen) & hit[:, None]
        best[bad] = torch.where(use, other[bad], best[bad])
        ok[bad] |= hit
        found[bad] = hit
    return best, ok, found


@cache
def _hadamard(device: torch.device) -> Tensor:
    j = torch.arange(32)
    parity = torch.zeros(32, 32, dtype=torch.long)
    for i in range(5):
        parity ^= (j[:, None] >> i & 1) & (j[None, :] >> i & 1)
    return (1.0 - 2.0 * parity).to(device)


def _pack(bits: Tensor) -> Tensor:
    """u8 `[R, ceil(K/8)]` of bits u8 `[R, K]`."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    weight = 1 << torch.arange(8, device=bits.device)
    return (bits * weight).sum(-1).to(torch.uint8)


def _syndromes(x, leaders, scales, stored, g, site: SiteSpec, profile, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
    """(one-bit codes u8 `[R, K]`, rows whose check holds, rows that a search repaired)."""
    width, groups = site.width, -(-site.width // 32)
    pad = site.scale_row * site.block - width
    blocks = torch.nn.functional.pad(x, (0, pad)).view(len(x), site.scale_row, site.block)
    z = profile.normalise(blocks, scales, profile.scale_value(scales), g if profile.has_global else None)
    z = torch.nan_to_num(z, nan=6.0).flatten(1)[:, :width].abs().clamp(max=16)
    bounds = torch.tensor(_BOUNDS, device=x.device)
    own = torch.bucketize(z, bounds) & 1
    gap = (z[..., None] - bounds).abs().amin(-1)
    noise = sigma * ((z.square() + z.square().mean(1, keepdim=True)) / 2).sqrt()
    ratio = gap / noise.clamp(min=1e-9)
    reliable = (torch.special.log_ndtr(ratio) - torch.special.log_ndtr(-ratio)).clamp(max=_SURE)
    fill = groups * 32 - width
    signed = torch.where((own ^ leaders.long()) == 1, -reliable, reliable)
    # Nothing is known of the places beyond the row: its codes there are zeros, but the leaders there are not read.
    signed = torch.nn.functional.pad(signed, (0, fill)).view(len(x), groups, 32)
    spectrum = signed @ _hadamard(x.device)
    best = spectrum.abs().topk(2, -1)
    rows = _hadamard(x.device)[best.indices]  # [R, groups, 2, 32]
    flip = spectrum.gather(-1, best.indices)[..., None] * rows < 0
    words = flip.to(torch.uint8) ^ torch.nn.functional.pad(leaders, (0, fill)).view(len(x), groups, 1, 32)
    first, second = (words[:, :, k].reshape(len(x), -1)[:, :width].contiguous() for k in (0, 1))
    packed = _pack(first)
    wrong = check16(packed) ^ stored
    ok = wrong == 0
    found = torch.zeros_like(ok)
    bad = _to_search(ok)
    if bad is not None:
        margin = (best.values[..., 0] - best.values[..., 1])[bad]
        pick = margin.topk(min(LIST, groups), 1, largest=False).indices
        change = shares(packed[bad]) ^ shares(_pack(second[bad]))
        change = torch.nn.functional.pad(change, (0, groups * 4 - change.shape[1])).view(-1, groups, 4)
        change = change[..., 0] ^ change[..., 1] ^ change[..., 2] ^ change[..., 3]
        hit, chosen = search(wrong[bad], change.gather(1, pick))
        hit = hit & ~ok[bad]
        use = torch.zeros_like(margin, dtype=torch.bool).scatter(1, pick, chosen) & hit[:, None]
        use = use.repeat_interleave(32, 1)[:, :width]
        first[bad] = torch.where(use, second[bad], first[bad])
        ok[bad] |= hit
        found[bad] = hit
    return first, ok, found
