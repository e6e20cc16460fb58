"""From the scheduler to the guidance store: a thread writes what finished requests left."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import queue
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracekit.guidance import GuidanceWriter
from tracekit.rollout.sglang.capture import Column, split
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.store import Found

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60
"""The longest that an ending process waits for the disk."""


@dataclass(slots=True)
class Finished:
    """A request's rows, token 0 to the last that was fed to the model."""

    step: str
    trajectory: str
    tokens: np.ndarray
    """int64 [n + 1]: the last one has no row."""
    rows: Found


class Handover:
    """Owns the writers, one a step; a new step seals the one before. An error is kept and raised by `check`."""

    def __init__(self, settings: Settings, columns: Mapping[str, Column]) -> None:
        """`columns` are what a row holds."""
        self.settings, self.columns = settings, columns
        self._queue: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="tracekit-guidance", daemon=True)
        self._thread.start()

    def put(self, finished: Finished) -> None:
        """Write `finished` soon. Raises what stopped the thread."""
        self.check()
        self._queue.put(finished)

    def check(self) -> None:
        """Raise what stopped the thread, if anything did."""
        if self._error is not None:
            raise RuntimeError(f"tracekit: guidance can't be written any more: {self._error}") from self._error

    def close(self) -> None:
        """Write what is queued and seal the last dataset; again: nothing."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        writer: GuidanceWriter | None = None
        step = ""
        try:
            while (item := self._queue.get()) is not None:
                folder = Path(self.settings.folder) / item.step
                if item.step != step or not folder.exists():  # a resumed run removes the step that it takes again
                    self._seal(writer, step)
                    writer = GuidanceWriter(folder, self.settings.schema, encoding=self.settings.encoding)
                    step = item.step
                self._write(writer, item)
            self._seal(writer, step)
        except BaseException as error:  # raised by the next put, on the scheduler's thread
            self._error = error
            logger.exception("tracekit: the guidance thread ended")

    def _seal(self, writer: GuidanceWriter | None, step: str) -> None:
        if writer is not None and (Path(self.settings.folder) / step).exists():  # it may be consumed and gone
            writer.close()

    def _write(self, writer: GuidanceWriter, item: Finished) -> None:
        arrays, versions = split(item.rows.gather(), self.columns), item.rows.versions
        if self.settings.keep_activations:  # before the record, which tells others that all is there
            self._write_activations(item, arrays, versions)
        part = (self.settings.part, self.settings.parts)
        trajectory = writer.begin(item.trajectory, token_ids=item.tokens, policy_version=int(versions.min()), part=part)
        for site in self.settings.sites:
            codes = arrays.get(f"{site.name}/codes")
            trajectory.append(site.name, 0, codes, arrays[f"{site.name}/scales"], packed=True)
        changes = np.flatnonzero(np.diff(versions)) + 1
        starts = np.concatenate([[0], changes]) if len(versions) else changes
        spans = [[int(a), int(versions[a])] for a in starts]
        trajectory.commit(extra={"versions": spans}).result(60)

    def _write_activations(self, item: Finished, arrays: dict[str, np.ndarray], versions: np.ndarray) -> None:
        folder = Path(self.settings.folder) / "activations" / item.step
        folder.mkdir(parents=True, exist_ok=True)
        names = {name.replace("/", "|"): array for name, array in arrays.items()}
        rank = f".part{self.settings.part}" if self.settings.parts > 1 else ""
        np.savez(folder / f"{item.trajectory}{rank}.npz", tokens=item.tokens, versions=versions, **names)


def seal_at_end(handover: Handover) -> None:
    """Close `handover` when this process returns, fails or is told to end by SIGTERM."""
    # A process that multiprocessing started runs these finalizers, and no atexit function.
    multiprocessing.util.Finalize(None, handover.close, exitpriority=10)
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number, _frame):
        handover.close()
        signal.signal(number, before if callable(before) else signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
