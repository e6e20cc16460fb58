"""Host memory of what each forward rounded, by KV slot."""

from __future__ import annotations

import queue
import threading

import numpy as np


class Found:
    """Rows of some tokens, as they were when they were asked for; slots may be written again at once."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self._first: Found | None = None
        self._ready = threading.Event()
        self._rows = np.empty((0, 0), np.uint8)
        self._versions = np.empty(0, np.int64)
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def behind(self, first: Found | None) -> Found:
        """These tokens' rows, but those of `first` for as many tokens as it has."""
        self._first = first
        return self

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows u8 [n, R] and the policy versions int64 [n] that computed them; waits until they are there.

        Raises KeyError for a slot that no forward has filled.
        """
        self._ready.wait()
        if self._error is not None:
            raise self._error
        if self._first is not None:
            rows, versions = self._first.result()
            n = min(len(rows), len(self))
            self._rows[:n], self._versions[:n] = rows[:n], versions[:n]
            self._first = None
        return self._rows, self._versions


class SlotStore:
    """A row a slot, in one array that is as large as the engine's cache and never grows.

    The scheduler's thread only queues; a thread of the store's own writes rows to their slots and reads them, in the
    order in which it was told, so that what a request has at its end is read before its slots are written again. Rows
    that arrive in pinned memory give it back soon. The queue is bounded: a store that falls behind holds the scheduler
    back rather than growing or losing rows.
    """

    WAITING = 256
    """Forwards and requests that may wait for the store's thread."""

    def __init__(self, slots: int, row_bytes: int) -> None:
        self._rows = np.zeros((slots, row_bytes), np.uint8)
        self._versions = np.full(slots, -1, np.int64)
        self._queue: queue.Queue = queue.Queue(self.WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="tracekit-slots", daemon=True)
        self._thread.start()

    def put(self, slots: np.ndarray, rows: np.ndarray, version: int) -> None:
        """Keep `rows` [T, R], row i for slot `slots[i]`; both belong to the store from now on. Later duplicates of a
        slot (padding) win. Raises what stopped the store's thread."""
        if self._error is not None:
            raise RuntimeError(f"tracekit: rows can't be kept any more: {self._error}") from self._error
        self._queue.put((slots, rows, version))

    def find(self, slots: np.ndarray) -> Found:
        """The rows of `slots` [n] as they are now."""
        found = Found(slots)
        self._queue.put(found)
        return found

    def close(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return self._rows.nbytes

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, Found):
                    self._fill(item)
                else:
                    slots, rows, version = item
                    self._rows[slots] = rows
                    self._versions[slots] = version
            except BaseException as error:  # raised by the next put, on the scheduler's thread; finds go on
                self._error = error
            item = slots = rows = None  # or the last forward's pinned memory waits for the next

    def _fill(self, found: Found) -> None:
        try:
            found._versions = self._versions[found.slots]
            if (found._versions < 0).any():
                raise KeyError(int(found.slots[np.flatnonzero(found._versions < 0)[0]]))
            found._rows = self._rows[found.slots]
        except BaseException as error:
            found._error = error
        finally:
            found._ready.set()
