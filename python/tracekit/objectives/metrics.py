"""Metrics that add up: sums, extremes and samples from each microbatch, merged, reduced over ranks, then finalized.

A name such as `mismatch/kl_k1` is not kept as a value but as a recipe over raw sums, so that merging microbatches or
ranks gives exactly the number of the whole batch. A metric whose count is 0 is left out of `finalize()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Metrics:
    """Accumulators of one or many microbatches. Detached; nothing waits for the device before `finalize`."""

    def __init__(self):
        self._sums: dict[str, tuple[tuple[str, ...], Tensor]] = {}
        self._maxima: dict[str, tuple[tuple[str, ...], Tensor]] = {}
        self._samples: dict[str, Tensor] = {}
        self._recipes: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._histograms: dict[str, dict] = {}

    def sums(self, block: str, values: Mapping[str, Tensor]) -> None:
        """Raw sums under `block:key`."""
        keys = tuple(values)
        packed = torch.stack([torch.as_tensor(v).detach().reshape(()).double() for v in values.values()])
        self._sums[block] = (keys, packed)

    def token_sums(self, block: str, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Raw masked sums of [T] tensors under `block:key`, and their count under `block:n`."""
        stacked = torch.stack([v.detach() for v in values.values()])
        packed = torch.where(mask, stacked, 0.0).sum(-1, dtype=torch.float64)
        count = mask.sum(dtype=torch.float64).reshape(1)
        self._sums[block] = ((*values, "n"), torch.cat([packed, count]))

    def maxima(self, block: str, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Masked maxima, reported under their own names; keep a minimum as the maximum of -x under a name "-name"."""
        stacked = torch.stack([v.detach() for v in values.values()]).double()
        if stacked.shape[-1] == 0:
            packed = stacked.new_full((stacked.shape[0],), -math.inf)
        else:
            packed = torch.where(mask, stacked, -math.inf).amax(-1)
        self._maxima[block] = (tuple(values), packed)

    def recipe(self, name: str, kind: str, *raw: str) -> None:
        """`name` is `kind` (see `_RECIPES`) of the raw sums `raw`."""
        self._recipes[name] = (kind, raw)

    def means(self, block: str, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Masked means of [T] (or [N]) tensors, under their own names."""
        self.token_sums(block, values, mask)
        for name in values:
            self.recipe(name, "mean", f"{block}:{name}", f"{block}:n")

    def sample(self, name: str, values: Tensor) -> None:
        """Keep single values (one a response at most): quantiles do not add."""
        self._samples[name] = values.detach().reshape(-1).double()

    def histogram(self, name: str, counts: Tensor, **description) -> None:
        """Counts of fixed bins; `description` (edges, lines to draw) comes back beside them."""
        flat = counts.detach().reshape(-1).double()
        self._sums[f"hist:{name}"] = (tuple(map(str, range(flat.numel()))), flat)
        self._histograms[name] = {"shape": tuple(counts.shape), **description}

    def merge(self, other: Metrics) -> Metrics:
        """Add another microbatch's metrics of the same objective. Returns self."""
        for mine, theirs, join in (
            (self._sums, other._sums, torch.add),
            (self._maxima, other._maxima, torch.maximum),
        ):
            for block, (keys, value) in theirs.items():
                mine[block] = (keys, join(mine[block][1], value) if block in mine else value)
        for name, values in other._samples.items():
            self._samples[name] = torch.cat([self._samples[name], values]) if name in self._samples else values
        self._recipes.update(other._recipes)
        self._histograms.update(other._histograms)
        return self

    def all_reduce(self, process_group: dist.ProcessGroup | None) -> Metrics:
        """Merge over ranks, in place. Collective: every rank calls it with the metrics of the same objective."""
        if process_group is None:
            return self
        for store, op in ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX)):
            if store:
                packed = torch.cat([v for _, v in store.values()])
                dist.all_reduce(packed, op=op, group=process_group)
                pieces = packed.split([v.numel() for _, v in store.values()])
                for (block, (keys, _)), piece in zip(list(store.items()), pieces, strict=True):
                    store[block] = (keys, piece)
        for name, values in self._samples.items():
            parts = [None] * dist.get_world_size(process_group)
            dist.all_gather_object(parts, values.cpu(), group=process_group)
            self._samples[name] = torch.cat(parts)
        return self

    def finalize(self) -> dict[str, float]:
        """Every metric by its documented name."""
        raw: dict[str, float] = {}
        for block, (keys, value) in self._sums.items():
            if not block.startswith("hist:"):
                raw.update(zip((f"{block}:{k}" for k in keys), value.tolist(), strict=True))
        out: dict[str, float] = {}
        for name, (kind, args) in self._recipes.items():
            value = _RECIPES[kind](*(raw[a] for a in args))
            if value is not None:
                out[name] = value
        for keys, value in self._maxima.values():
            for key, v in zip(keys, value.tolist(), strict=True):
                if v != -math.inf:
                    out[key.removeprefix("-")] = -v if key.startswith("-") else v
        return out

    def samples(self) -> dict[str, Tensor]:
        """The kept single values, by name."""
        return dict(self._samples)

    def histograms(self) -> dict[str, dict]:
        """name → {"counts": nested list, "edges": …, …}, ready for JSON."""
        out = {}
        for name, description in self._histograms.items():
            description = dict(description)
            shape = description.pop("shape")
            out[name] = {"counts": self._sums[f"hist:{name}"][1].reshape(shape).tolist(), **description}
        return out


def _mean(total, n):
    return total / n if n else None


def _std(total, squares, n):
    return math.sqrt(max(squares - total * total / n, 0.0) / (n - 1)) if n > 1 else None


def _ess(total, squares, n):
    return total * total / (n * squares) if n and squares else None


def _chi2(squares, n):
    return squares / n - 1 if n else None


def _pearson(x, y, xx, yy, xy, n):
    if n < 2:
        return None
    spread = (n * xx - x * x) * (n * yy - y * y)
    return (n * xy - x * y) / math.sqrt(spread) if spread > 0 else None


def _explained(err, err2, y, yy, n):
    variance = yy / n - (y / n) ** 2 if n else 0.0
    return 1 - (err2 / n - (err / n) ** 2) / variance if variance > 0 else None


_RECIPES = {
    "sum": lambda total: total,
    "mean": _mean,
    "exp_mean": lambda total, n: math.exp(total / n) if n else None,
    "std": _std,
    "ess": _ess,
    "chi2": _chi2,
    "pearson": _pearson,
    "explained_variance": _explained,
    "is_zero": lambda total: float(total == 0),
}
"""How a reported number comes from raw sums."""
