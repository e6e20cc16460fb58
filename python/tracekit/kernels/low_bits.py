"""The low bits of codes as records hold them: b bits an element along a row, each row padded to a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError


def pack_low_bits(codes: Tensor, bits: int) -> Tensor:
    """Low bits (1..8) of u8 codes [..., K], rows packed least significant first: u8 [..., ceil(K * bits / 8)]."""
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits must be 1..8, not {bits}")
    kept = codes & ((1 << bits) - 1)
    k = codes.shape[-1]
    planes = (kept.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    stream = planes.flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -(k * bits) % 8)).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (stream * weights).sum(-1, dtype=torch.int32).to(torch.uint8)


def unpack_low_bits(packed: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of `pack_low_bits`: u8 [..., ceil(k * bits / 8)] -> u8 [..., k]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2)[..., : k * bits].unflatten(-1, (k, bits))
    return (stream << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)
