"""Many trajectories in one call of the writer."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Prefix = tuple[str, int] | None


@dataclass(slots=True)
class Batch:
    """The arguments of `GuidanceWriter.append_batch`, to take some of its trajectories."""

    ids: list[str]
    flat: np.ndarray
    offsets: np.ndarray
    counts: list[int]
    sites: dict[str, tuple[Any, Any, Any]]
    policies: np.ndarray
    prefixes: list[Prefix]

    def select(self, which: np.ndarray) -> "Batch":
        """The trajectories `which` (indices, ascending), their rows copied."""
        first = np.cumsum([0, *self.counts])
        rows = np.concatenate([np.arange(first[i], first[i + 1]) for i in which] or [np.zeros(0, np.int64)])
        tokens = [self.flat[self.offsets[i] : self.offsets[i + 1]] for i in which]
        return Batch(
            [self.ids[i] for i in which],
            *flatten(tokens),
            [self.counts[i] for i in which],
            {k: tuple(None if a is None else np.asarray(a)[rows] for a in v) for k, v in self.sites.items()},
            np.ascontiguousarray(self.policies[which]),
            [self.prefixes[i] for i in which],
        )


def whole_numbers(values: Any, what: str = "token_ids") -> np.ndarray:
    """Contiguous int64 of whole numbers; ValueError for others, which a cast would cut."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError(f"{what} has elements of {values.dtype}: pass int64")
    return np.ascontiguousarray(values, dtype=np.int64)


def flatten(token_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """`(flat int64, offsets int64 [N+1])` of a list of arrays, or of such a pair."""
    if isinstance(token_ids, tuple) and len(token_ids) == 2:
        flat, offsets = token_ids
        return whole_numbers(flat), whole_numbers(offsets, "offsets")
    arrays = [whole_numbers(t).reshape(-1) for t in token_ids]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.int64)), offsets
