"""A byte budget over the guidance of many steps: what may be deleted, and when a producer must wait."""

import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracekit.errors import DataError


class GuidanceBudget:
    """Watches the datasets under `root`, one folder a step.

    A training loop calls `wait_room` before it samples, `retain` when a folder is written, `consumed` when a step has
    read it and `checkpointed` when the state after that step is safe on disk. Only then is a folder deleted, and only
    once every step that retained it has come so far: what is over budget makes `wait_room` wait, it does not vanish.
    A loop that samples in its own thread says with `expect` what its next step will write, and makes a checkpoint when
    `wants_checkpoint`.
    A process that dies leaves all folders since its last checkpoint, which a resumed run reads again.
    `byte_budget=None` has no limit. Safe to use from several threads of one process.
    """

    def __init__(self, root: Any, byte_budget: int | None = None) -> None:
        self.root = Path(root)
        self.byte_budget = byte_budget
        self._references: dict[str, int] = {}
        self._consumed: list[tuple[int, str]] = []
        self._starved = self._expected = 0
        self._safe = -1
        self._changed = threading.Condition()  # over an RLock

    def usage(self) -> int:
        """Bytes on disk under `root`."""
        total = 0
        for folder, _, files in os.walk(self.root):
            for name in files:
                try:
                    total += os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError:  # deleted or renamed meanwhile
                    pass
        return total

    def retain(self, folder: str) -> None:
        """Counts a user of `root/folder`: a step that has still to read it."""
        with self._changed:
            self._references[folder] = self._references.get(folder, 0) + 1

    def consumed(self, step: int, folders: str | Iterable[str]) -> None:
        """Notes that `step` has read these folders for the last time. Nothing is deleted: until a checkpoint holds what
        was learnt from them, a resumed run needs them."""
        names = [folders] if isinstance(folders, str) else list(folders)
        with self._changed:
            for name in names:
                waiting = sum(f == name for _, f in self._consumed)
                if self._references.get(name, 0) <= waiting:
                    raise DataError(
                        f"guidance folder '{name}' was not retained for step {step}: retain it when written"
                    )
                self._consumed.append((step, name))

    def checkpointed(self, step: int, keep: int = 0) -> list[str]:
        """The state after `step` is safe on disk: gives back what steps up to it consumed, but for the newest `keep`
        of them (-1: all), which stay while there is room. Returns deleted folders."""
        with self._changed:
            self._safe = max(self._safe, step)
            self._changed.notify_all()
            due = self._due()
            deleted = [] if keep < 0 else self._give_back(due[: max(len(due) - keep, 0)])
            return deleted + self._make_room(self._expected)

    def expect(self, n_bytes: int) -> None:
        """Says what the next step is going to write: `wants_checkpoint` looks ahead by that much."""
        with self._changed:
            self._expected = n_bytes

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint would make room that is asked for: save one now, or all wait for ever."""
        with self._changed:
            held = any(step > self._safe for step, _ in self._consumed)
            return held and (self._starved > 0 or not self._fits(self._expected))

    def _fits(self, n_bytes: int) -> bool:
        return self.byte_budget is None or self.usage() + n_bytes <= self.byte_budget

    def _room_for(self, n_bytes: int) -> bool:
        self._make_room(n_bytes)
        return self._fits(n_bytes)

    def _due(self) -> list[tuple[int, str]]:
        return [entry for entry in self._consumed if entry[0] <= self._safe]

    def _give_back(self, entries: list[tuple[int, str]]) -> list[str]:
        deleted = []
        for entry in entries:
            if self.release(entry[1]):
                deleted.append(entry[1])
            self._consumed.remove(entry)
        return deleted

    def _make_room(self, n_bytes: int) -> list[str]:
        """Deletes what was kept beyond its use, oldest first, until `n_bytes` fit."""
        deleted = []
        while (due := self._due()) and not self._fits(n_bytes):
            deleted += self._give_back(due[:1])
        return deleted

    def release(self, folder: str) -> bool:
        """Gives one use back; the last one deletes the folder. Returns whether it was deleted."""
        with self._changed:
            count = self._references.get(folder, 0)
            if count == 0:
                raise DataError(f"guidance folder '{folder}' was not retained: retain it before its step is read")
            if count > 1:
                self._references[folder] = count - 1
                return False
            # Under another name first: nobody opens half a dataset, and a failure leaves the folder as it was.
            trash = self.root / f".deleted-{uuid.uuid4().hex[:8]}"
            try:
                os.rename(self.root / folder, trash)
            except FileNotFoundError:  # somebody made room by hand
                pass
            del self._references[folder]
            self._changed.notify_all()
        if trash.exists():
            shutil.rmtree(trash)
        return True

    def wait_room(self, n_bytes: int, timeout: float | None = None) -> None:
        """Waits until `n_bytes` more fit. DataError after `timeout` seconds, or if they never can."""
        if self.byte_budget is None:
            return
        if n_bytes > self.byte_budget:
            raise DataError(
                f"{n_bytes} bytes of guidance never fit the budget of {self.byte_budget}: raise guidance.byte_budget"
            )
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._starved += 1
            try:
                while not self._room_for(n_bytes):
                    used = self.usage()
                    left = 1.0 if until is None else until - time.monotonic()
                    if left <= 0:
                        waiting = len({f for _, f in self._consumed})
                        raise DataError(
                            f"guidance under {self.root} takes {used} of {self.byte_budget} bytes and no step was "
                            f"released in {timeout} s ({waiting} folders wait for a checkpoint): checkpoint oftener, "
                            "raise guidance.byte_budget, or see why the learner does not get on"
                        )
                    self._changed.wait(min(left, 1.0))
            finally:
                self._starved -= 1
