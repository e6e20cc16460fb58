"""From the scheduler to the guidance store: a thread writes what finished requests left."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracekit.guidance import GuidanceWriter
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.store import Arrays

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Finished:
    """A request's rows, token 0 to the last that was fed to the model."""

    step: str
    trajectory: str
    tokens: np.ndarray
    """int64 [n + 1]: the last one has no row."""
    arrays: Arrays
    versions: np.ndarray
    """int64 [n]: policy version of each row."""


class Handover:
    """Owns the writers, one a step; a new step seals the one before. An error is kept and raised by `check`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
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
        """Write what is queued and seal the last dataset."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        writer: GuidanceWriter | None = None
        step = ""
        try:
            while (item := self._queue.get()) is not None:
                if item.step != step:
                    self._seal(writer, step)
                    folder = Path(self.settings.folder) / item.step
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
        trajectory = writer.begin(item.trajectory, token_ids=item.tokens, policy_version=int(item.versions.min()))
        for site in self.settings.sites:
            codes = item.arrays.get(f"{site.name}/codes")
            trajectory.append(site.name, 0, codes, item.arrays[f"{site.name}/scales"], packed=True)
        changes = np.flatnonzero(np.diff(item.versions)) + 1
        starts = np.concatenate([[0], changes]) if len(item.versions) else changes
        spans = [[int(a), int(item.versions[a])] for a in starts]
        trajectory.commit(extra={"versions": spans}).result(60)
