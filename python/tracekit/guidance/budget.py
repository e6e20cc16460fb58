"""A byte budget over the guidance of many steps: what may be deleted, and when a producer must wait."""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from tracekit.errors import DataError


class GuidanceBudget:
    """Watches the datasets under `root`, one folder a step.

    A folder is deleted when it was released (its step is consumed and checkpointed) as often as it was retained, and
    never before: what is over budget and not released makes `wait_room` wait, not vanish. `byte_budget=None` has no
    limit. Safe to use from several threads of one process.
    """

    def __init__(self, root: Any, byte_budget: int | None = None) -> None:
        self.root = Path(root)
        self.byte_budget = byte_budget
        self._references: dict[str, int] = {}
        self._changed = threading.Condition()

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

    def release(self, folder: str) -> bool:
        """Gives one use back; the last one deletes the folder. Returns whether it was deleted."""
        with self._changed:
            count = self._references.get(folder, 0)
            if count == 0:
                raise DataError(f"guidance folder '{folder}' was not retained: retain it before its step is read")
            if count > 1:
                self._references[folder] = count - 1
                return False
            del self._references[folder]
            shutil.rmtree(self.root / folder, ignore_errors=False)
            self._changed.notify_all()
            return True

    def wait_room(self, n_bytes: int, timeout: float | None = None) -> None:
        """Waits until `n_bytes` more fit. DataError after `timeout` seconds, or if they never can."""
        if self.byte_budget is None:
            return
        if n_bytes > self.byte_budget:
            raise DataError(
                f"{n_bytes} bytes of guidance never fit the budget of {self.byte_budget}: raise byte_budget"
            )
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (used := self.usage()) + n_bytes > self.byte_budget:
                left = 1.0 if until is None else until - time.monotonic()
                if left <= 0:
                    raise DataError(
                        f"guidance under {self.root} takes {used} of {self.byte_budget} bytes and no step was released "
                        f"in {timeout} s: raise byte_budget, or see why the learner does not get on"
                    )
                self._changed.wait(min(left, 1.0))
