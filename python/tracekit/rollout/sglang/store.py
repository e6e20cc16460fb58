"""Host memory of what each forward rounded, by KV slot."""

from __future__ import annotations

import numpy as np

from tracekit import _core


class Found:
    """Rows of some tokens, as they were when they were asked for; slots may be written again at once."""

    def __init__(self, core: _core.Found, count: int, row_bytes: int) -> None:
        self._core, self._count, self._row_bytes = core, count, row_bytes
        self._first: Found | None = None

    def __len__(self) -> int:
        return self._count

    def behind(self, first: Found | None) -> Found:
        """These tokens' rows, but those of `first` for as many tokens as it has."""
        self._first = first
        return self

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows u8 [n, R] and the policy versions int64 [n] that computed them; waits until they are there.

        Raises KeyError for a slot that no forward has filled.
        """
        rows, versions = np.empty((self._count, self._row_bytes), np.uint8), np.empty(self._count, np.int64)
        self._core.copy_to(rows, versions)
        if self._first is not None:
            first, first_versions = self._first.result()
            n = min(len(first), self._count)
            rows[:n], versions[:n] = first[:n], first_versions[:n]
        return rows, versions


class SlotStore:
    """A row a slot, in one array that is as large as the engine's cache and never grows.

    The scheduler's thread only queues; a thread outside the interpreter writes rows to their slots and reads them, in
    the order in which it was told, so that what a request has at its end is read before its slots are written again.
    Rows that arrive in pinned memory give it back at the next call. The queue is bounded: a store that falls behind
    holds the scheduler back rather than growing or losing rows.
    """

    WAITING = 256
    """Forwards and requests that may wait for the store's thread."""

    def __init__(self, slots: int, row_bytes: int) -> None:
        self.bytes, self._row_bytes = slots * row_bytes, row_bytes
        self._core = _core.SlotStore(slots, row_bytes, self.WAITING)

    def put(self, slots: np.ndarray, rows: np.ndarray, version: int) -> None:
        """Keep `rows` u8 [T, R], row i for slot `slots[i]` (int64); both belong to the store from now on. Later
        duplicates of a slot (padding) win. Raises RuntimeError for what an earlier call could not do."""
        if (error := self._core.error) is not None:
            raise RuntimeError(f"tracekit: rows can't be kept any more: {error}")
        self._core.put(slots, rows, version)

    def find(self, slots: np.ndarray) -> Found:
        """The rows of `slots` int64 [n] as they are now."""
        return Found(self._core.find(slots), len(slots), self._row_bytes)

    def close(self) -> None:
        """End the thread after what is queued."""
        self._core.close()
