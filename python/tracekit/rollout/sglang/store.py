"""Host memory of what each forward rounded: blocks as they came, found again by KV slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROW_BITS = 24
"""A row's number within its block; the block's number lies above."""


@dataclass(slots=True)
class Block:
    """The rows of one forward, u8 [T, R], and the policy version that computed them."""

    rows: np.ndarray
    version: int
    live: int
    """Rows that some slot still points to."""


@dataclass(slots=True)
class Found:
    """Rows of some tokens: where they lie. It holds their blocks, so slots may be written again before `gather`."""

    blocks: list[np.ndarray]
    which: np.ndarray
    """int64 [n]: the block of each token."""
    at: np.ndarray
    """int64 [n]: its row there."""
    versions: np.ndarray
    """int64 [n]: the policy version that computed it."""

    def __len__(self) -> int:
        return len(self.which)

    def behind(self, first: Found | None) -> Found:
        """These tokens' rows, but those of `first` for as many tokens as it has."""
        if first is None:
            return self
        n = min(len(first), len(self))
        return Found(
            blocks=first.blocks + self.blocks,
            which=np.concatenate([first.which[:n], self.which[n:] + len(first.blocks)]),
            at=np.concatenate([first.at[:n], self.at[n:]]),
            versions=np.concatenate([first.versions[:n], self.versions[n:]]),
        )

    def gather(self) -> np.ndarray:
        """The rows themselves, u8 [n, R]."""
        out = np.empty((len(self), self.blocks[0].shape[1] if self.blocks else 0), np.uint8)
        order = np.argsort(self.which, kind="stable")
        ends = np.searchsorted(self.which[order], np.arange(len(self.blocks)), side="right")
        for block, tokens in zip(self.blocks, np.split(order, ends), strict=False):
            out[tokens] = block[self.at[tokens]]
        return out


class SlotStore:
    """Rows by KV slot. A forward's rows are kept where they arrived; only a table of slots is written.

    A slot that is written again forgets its old row, and a block without rows is dropped, so that memory follows the
    engine's own cache. One thread (the scheduler's) uses it.
    """

    def __init__(self, slots: int) -> None:
        self._where = np.full(slots, -1, np.int64)
        self._blocks: dict[int, Block] = {}
        self._next = 0

    def put(self, slots: np.ndarray, rows: np.ndarray, version: int) -> None:
        """Keep `rows` [T, R], row i for slot `slots[i]`. Later duplicates of a slot (padding) win."""
        number, self._next = self._next, self._next + 1
        distinct = np.unique(slots)
        old = self._where[distinct]
        self._where[slots] = (number << ROW_BITS) + np.arange(len(slots))
        self._blocks[number] = Block(rows, version, len(distinct))
        for block, count in zip(*np.unique(old[old >= 0] >> ROW_BITS, return_counts=True), strict=True):
            self._forget(int(block), int(count))

    def _forget(self, number: int, count: int) -> None:
        block = self._blocks[number]
        block.live -= count
        if block.live == 0:
            del self._blocks[number]

    def find(self, slots: np.ndarray) -> Found:
        """Where the rows of `slots` [n] are. Raises KeyError for a slot that no forward has filled."""
        where = self._where[slots]
        if (where < 0).any():
            raise KeyError(int(slots[np.flatnonzero(where < 0)[0]]))
        numbers, which = np.unique(where >> ROW_BITS, return_inverse=True)
        blocks = [self._blocks[int(number)] for number in numbers]
        versions = np.array([block.version for block in blocks], np.int64)[which]
        return Found([block.rows for block in blocks], which, where & ((1 << ROW_BITS) - 1), versions)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(block.rows.nbytes for block in self._blocks.values())
