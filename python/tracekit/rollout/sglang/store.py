"""Host memory of what each forward rounded: blocks as they came, found again by KV slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROW_BITS = 24
"""A row's number within its block; the block's number lies above."""

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class Block:
    """The rows of one forward: arrays u8 [T, ...] by name, and the policy version that computed them."""

    arrays: Arrays
    version: int
    live: int
    """Rows that some slot still points to."""


class SlotStore:
    """Rows by KV slot. A forward's rows are kept where they arrived; only a table of slots is written.

    A slot that is written again forgets its old row, and a block without rows is dropped, so that memory follows the
    engine's own cache. One thread (the scheduler's) uses it.
    """

    def __init__(self, slots: int) -> None:
        self._where = np.full(slots, -1, np.int64)
        self._blocks: dict[int, Block] = {}
        self._next = 0

    def put(self, slots: np.ndarray, arrays: Arrays, version: int) -> None:
        """Keep `arrays` [T, ...], row i for slot `slots[i]`. Later duplicates of a slot (padding) win."""
        number, self._next = self._next, self._next + 1
        old = self._where[slots]
        self._where[slots] = (number << ROW_BITS) + np.arange(len(slots))
        distinct = np.unique(slots)
        self._blocks[number] = Block(arrays, version, len(distinct))
        if len(distinct) != len(slots):
            old = old[np.unique(slots, return_index=True)[1]]
        for block, count in zip(*np.unique(old[old >= 0] >> ROW_BITS, return_counts=True), strict=True):
            self._forget(int(block), int(count))

    def _forget(self, number: int, count: int) -> None:
        block = self._blocks[number]
        block.live -= count
        if block.live == 0:
            del self._blocks[number]

    def take(self, slots: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """The rows of `slots` [n]: arrays [n, ...] and the policy version of each row, int64 [n].

        Raises KeyError for a slot that no forward has filled.
        """
        where = self._where[slots]
        if (where < 0).any():
            raise KeyError(int(slots[np.flatnonzero(where < 0)[0]]))
        numbers, rows = where >> ROW_BITS, where & ((1 << ROW_BITS) - 1)
        out: Arrays = {}
        versions = np.empty(len(slots), np.int64)
        for number in np.unique(numbers):
            block, at = self._blocks[int(number)], numbers == number
            versions[at] = block.version
            for name, array in block.arrays.items():
                if name not in out:
                    out[name] = np.empty((len(slots), *array.shape[1:]), array.dtype)
                out[name][at] = array[rows[at]]
        return out, versions

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(a.nbytes for block in self._blocks.values() for a in block.arrays.values())
