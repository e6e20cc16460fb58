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

    A slot that is written again forgets its old row. Blocks that no slot points to are looked for every
    `sweep_rows` rows, not at each forward, so that memory follows the engine's own cache and a decode step costs the
    scheduler a few microseconds. One thread (the scheduler's) uses it.
    """

    def __init__(self, slots: int) -> None:
        self._where = np.full(slots, -1, np.int64)
        self._blocks: dict[int, Block] = {}
        self._next = 0
        self._rows = np.arange(1024)
        self._unswept = 0
        self.sweep_rows = max(1, min(slots // 2, 1 << 16))

    def put(self, slots: np.ndarray, rows: np.ndarray, version: int) -> None:
        """Keep `rows` [T, R], row i for slot `slots[i]`. Later duplicates of a slot (padding) win."""
        count = len(slots)
        if count > len(self._rows):
            self._rows = np.arange(2 * count)
        self._where[slots] = self._rows[:count] + (self._next << ROW_BITS)
        self._blocks[self._next] = Block(rows, version)
        self._next += 1
        self._unswept += count
        if self._unswept >= self.sweep_rows:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the blocks that no slot points to."""
        first = next(iter(self._blocks))
        live = np.zeros(self._next - first, bool)
        filled = self._where[self._where >= 0]
        live[(filled >> ROW_BITS) - first] = True
        self._blocks = {n: block for n, block in self._blocks.items() if live[n - first]}
        self._unswept = 0

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
