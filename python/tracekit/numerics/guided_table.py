"""Guided rounding over any sorted table of code magnitudes; W4A8's E4M3 activations are guided through it.

The paper states the rule for FP4 codes. That it carries over to E4M3 is an assumption of this package: magnitudes
sorted by code, low bits c of the rollout's code, q_hat the magnitude nearest |z| whose code ends in c, the result
whichever of |z|'s two neighbours is nearer q_hat. Over the E2M1 table it is `guided_round`, cell for cell.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.numerics.eight_bit import E4M3
from tracekit.numerics.formats import E4M3_MAX, e4m3_decode
from tracekit.numerics.profiles import profile_info
from tracekit.numerics.quantize import fake_quantize, from_blocks, straight_through, to_blocks


@functools.lru_cache(maxsize=8)
def e4m3_magnitudes(device: torch.device) -> Tensor:
    """fp64 [127]: magnitudes of codes 0..126."""
    return e4m3_decode(torch.arange(127, dtype=torch.uint8, device=device)).double()


def guide_by_table(z: Tensor, codes: Tensor, table: Tensor, *, bits: int, width: int, open_: bool = False) -> Tensor:
    """q* of fp32 z (|z| at most the table's last, no NaN) under low bits `codes` (u8): fp64, z's shape.

    `table` fp64 [N] rises from 0; entry i has code i, and codes of `width` bits have their sign in the last. With
    `bits == width` the code is whole. Ties as `guided_round`: the candidate in the bracket, else the smaller.
    """
    if open_:
        z = z + 0.0  # sgn(-0) is +
    a = z.abs().double()
    below = torch.searchsorted(table, a, right=True) - 1
    above = torch.searchsorted(table, a).clamp_(max=len(table) - 1)
    c = codes.long()
    if bits == width:
        target = c & ((1 << (width - 1)) - 1)
        target = torch.where((c >> (width - 1)).bool() != torch.signbit(z), -target, target)
    else:
        mask = (1 << bits) - 1
        down = below - ((below - c) & mask)
        up = above + ((c - above) & mask)
        twice = table[down.clamp(min=0)] + table[up.clamp(max=len(table) - 1)]
        rise = (2 * a > twice) | ((2 * a == twice) & (up == above))
        target = torch.where((up < len(table)) & (rise | (down < 0)), up, down)
    index = torch.where(target <= below, below, above)
    if open_:
        index = torch.where(below == above, below + (target - below).sign(), index)
    q = table[index.abs().clamp(max=len(table) - 1)]
    q = torch.where(index < 0, -q, q)
    return torch.where(torch.signbit(z), -q, q)


def guided_round_e4m3(
    x: Tensor, codes: Tensor, scales: Tensor, *, bits: int, profile: str | E4M3, rounding: str = "bracket"
) -> Tensor:
    """Quantise-dequantise x [..., K] under a record of E4M3 codes ("mxfp8", "fp8-e4m3"); gradient 1 to x only.

    `codes` u8 [..., K] hold the low `bits` (1..8; 8 is the whole code) bits, `scales` [..., nb] the rollout's: E8M0
    bytes, or fp32. A block whose scale is NaN (byte 0xFF) has no record and rounds to nearest under its own. NaN stays.
    """
    p = profile_info(profile)
    check_e4m3(p, bits, rounding)
    with torch.no_grad():
        xb = to_blocks(x.detach().float(), p.block or max(x.shape[-1], 1))
        value = p.scale_value(scales)
        z = p.normalise(xb, scales, value, None).clamp(-E4M3_MAX, E4M3_MAX)
        cb = to_blocks(codes, p.block or max(x.shape[-1], 1))
        table = e4m3_magnitudes(x.device)
        q = guide_by_table(z.nan_to_num(nan=0.0), cb, table, bits=bits, width=8, open_=rounding == "bracket_open")
        q = torch.where(z.isnan(), torch.nan, q.float())
        out = from_blocks(p.denormalise(q, value, None), x.shape[-1]).to(x.dtype)
        missing = value.isnan().unsqueeze(-1).expand(xb.shape)
        out = torch.where(from_blocks(missing, x.shape[-1]), fake_quantize(x.detach(), p), out)
    return straight_through(x, out)


def check_e4m3(p: E4M3, bits: int, rounding: str) -> None:
    """ConfigError unless E4M3 codes of p can be guided so."""
    if not isinstance(p, E4M3) or p.truncate:
        raise ConfigError(f"guided rounding over E4M3 codes is for mxfp8 and fp8-e4m3, not for {p.name}")
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits of an E4M3 code must be 1..8, not {bits}")
    if rounding not in ("bracket", "bracket_open"):
        raise ConfigError(f"rounding must be bracket or bracket_open, not {rounding!r}")
