"""The engine's rounding: one call a site and forward, into buffers that exist before any CUDA graph is captured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import EngineError
from tracekit.kernels import quantize_pack_into
from tracekit.kernels.low_bits import pack_low_bits
from tracekit.numerics import profile_info
from tracekit.rollout.sglang.settings import Settings


class Rounder:
    """Rounds activations to four bits and keeps codes and scales of the recorded sites.

    `tokens` is the most tokens that one forward has.
    """

    def __init__(self, settings: Settings, tokens: int, device: torch.device) -> None:
        self.settings, self.tokens = settings, tokens
        self.recorded = {site.name: site for site in settings.sites}
        self.unseen = set(self.recorded)
        """Sites that nothing was rounded at yet."""
        self.buffers: dict[str, Tensor] = {}
        for site in settings.sites:
            planes = (site.planes,) if site.planes > 1 or site.name[-2:] in (".k", ".v") else ()
            if site.bits:
                self.buffers[f"{site.name}/codes"] = self._empty(tokens, *planes, site.code_row, device=device)
            self.buffers[f"{site.name}/scales"] = self._empty(tokens, *planes, site.scale_row, device=device)
        self._scales = {name: torch.tensor([g], device=device) for name, g in settings.static_scales.items()}
        self._kept = {
            site.name: torch.zeros(tokens, site.planes * site.width, device=device)
            for site in settings.sites
            if settings.keep_activations
        }
        width = sum(math.prod(b.shape[1:]) for b in self.buffers.values())
        self.rows = self._empty(tokens, width, device=device)
        """What `buffers` hold, side by side. Filled within the forward, by its last recorded site: a CUDA graph holds
        that copy, and a decode step of the engine launches nothing for it."""
        self._last = max(self.recorded, key=_order, default=None)

    @staticmethod
    def _empty(*shape: int, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def round(self, site: str, x: Tensor, profile: str) -> Tensor:
        """`x` [T, K] or [T, heads, K] rounded under `profile`, as a new tensor of its type; recorded if it is to be."""
        return self.round_to_codes(site, x, profile)[0]

    def round_to_codes(self, site: str, x: Tensor, profile: str) -> tuple[Tensor, Tensor, Tensor]:
        """`round`, with the codes u8 [..., K/2] and scales u8 [..., K/block] of it; both may be written again by the
        next forward."""
        info = profile_info(profile)
        values = torch.empty_like(x, memory_format=torch.contiguous_format)
        scales = x.new_empty((*x.shape[:-1], x.shape[-1] // info.block), dtype=torch.uint8)
        packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
        low, bits, spec = None, 0, self.recorded.get(site)
        if spec is not None:
            if len(x) > self.tokens:
                raise EngineError(f"tracekit: a forward of {len(x)} tokens, buffers are for {self.tokens}")
            scales = self.buffers[f"{site}/scales"][: len(x)]
            if spec.bits:
                low, bits = self.buffers[f"{site}/codes"][: len(x)], spec.bits
            self._keep_activations(site, x)
        quantize_pack_into(
            x.contiguous(),
            profile,
            global_scale=self._scales.get(site) if info.has_global else None,
            packed=packed,
            scales=scales,
            low=low,
            bits=bits,
            values=values,
        )
        self._complete(site, len(x))
        return values, packed, scales

    def keep(self, site: str, x: Tensor, packed: Tensor, scales: Tensor) -> None:
        """Record what the engine rounded itself, if `site` is recorded: `x` [T, K], codes u8 [T, K/2], element 2j in
        the low nibble, scale bytes u8 [T, K/block]."""
        spec, count = self.recorded.get(site), len(packed)
        if spec is None:
            return
        if count > self.tokens:
            raise EngineError(f"tracekit: a forward of {count} tokens, buffers are for {self.tokens}")
        self.buffers[f"{site}/scales"][:count] = scales
        if spec.bits:
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
            self.buffers[f"{site}/codes"][:count] = pack_low_bits(codes, spec.bits)
        self._keep_activations(site, x)
        self._complete(site, count)

    def _keep_activations(self, site: str, x: Tensor) -> None:
        if site in self._kept:  # a buffer, as the others: CUDA graphs of several batch sizes write the same
            self._kept[site][: len(x)] = x.flatten(1)

    def _complete(self, site: str, count: int) -> None:
        self.unseen.discard(site)
        if site == self._last:
            torch.cat([b[:count].flatten(1) for b in self.buffers.values()], 1, out=self.rows[:count])

    def take(self, count: int) -> Tensor:
        """The last forward's first `count` rows as one tensor u8 [count, R], which `columns` takes apart. It is a copy:
        the rows are written again while it travels."""
        if self.settings.keep_activations:
            kept = [self._kept[s.name][:count].view(torch.uint8) for s in self.settings.sites]
            return torch.cat([self.rows[:count], *kept], 1)
        return self.rows[:count].clone()

    @property
    def columns(self) -> dict[str, Column]:
        """What a row of `take` holds, in order."""
        out = {name: Column(tuple(buffer.shape[1:]), np.dtype(np.uint8)) for name, buffer in self.buffers.items()}
        if self.settings.keep_activations:
            out |= {f"{s.name}/x": Column((s.planes, s.width), np.dtype("<f4")) for s in self.settings.sites}
        return out


def _order(site: str) -> tuple[int, int]:
    """Where a forward comes to `site`, layers.N.KIND."""
    _, layer, kind = site.split(".")
    return int(layer), ("k", "v", "moe_input").index(kind)


@dataclass(frozen=True, slots=True)
class Column:
    """One array's part of a row."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Of a row."""
        return math.prod(self.shape) * self.dtype.itemsize


def split(rows: np.ndarray, columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """The arrays [n, ...] in gathered rows u8 [n, R]."""
    out, at = {}, 0
    for name, column in columns.items():
        part = np.ascontiguousarray(rows[:, at : at + column.bytes])
        out[name] = part.view(column.dtype).reshape(len(rows), *column.shape)
        at += column.bytes
    return out
