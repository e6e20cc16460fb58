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

BATCH = 64
"""The most requests that are written at once."""
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
        self._places = places(settings, columns)
        self._queue: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._held: Finished | None = None
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
            while items := self._ready():
                folder = Path(self.settings.folder) / items[0].step
                # a resumed run removes the step that it takes again
                if items[0].step != step or not folder.exists():
                    self._seal(writer, step)
                    writer = GuidanceWriter(folder, self.settings.schema, encoding=self.settings.encoding)
                    step = items[0].step
                self._write(writer, items)
            self._seal(writer, step)
        except BaseException as error:  # raised by the next put, on the scheduler's thread
            self._error = error
            logger.exception("tracekit: the guidance thread ended")

    def _ready(self) -> list[Finished]:
        """The next requests of one step, as many as wait; none at the end.

        This thread shares its interpreter with the scheduler, which an idle engine never lets rest: each time that the
        thread asks for the lock it may wait `sys.getswitchinterval()`. So it asks for it a few times a batch, not a
        few times a site of each request (which took 0.4 s a request on an idle engine)."""
        items: list[Finished] = []
        while len(items) < BATCH:
            if self._held is None:
                if items and self._queue.empty():
                    break
                self._held = self._queue.get()
                if self._held is None:  # the end
                    self._queue.put(None)
                    break
            if items and self._held.step != items[0].step:
                break
            items.append(self._held)
            self._held = None
        return items

    def _seal(self, writer: GuidanceWriter | None, step: str) -> None:
        if writer is not None and (Path(self.settings.folder) / step).exists():  # it may be consumed and gone
            writer.close()

    def _write(self, writer: GuidanceWriter, items: list[Finished]) -> None:
        rows = []
        for item in items:
            found, versions = item.rows.result()
            if self.settings.keep_activations:  # before the record, which tells others that all is there
                self._write_activations(item, split(found, self.columns), versions)
            changes = np.flatnonzero(np.diff(versions)) + 1
            starts = np.concatenate([[0], changes]) if len(versions) else changes
            spans = [[int(a), int(versions[a])] for a in starts]
            rows.append((item.trajectory, item.tokens, int(versions.min()), found, {"versions": spans}))
        writer.append_rows(rows, self._places, part=(self.settings.part, self.settings.parts))

    def _write_activations(self, item: Finished, arrays: dict[str, np.ndarray], versions: np.ndarray) -> None:
        folder = Path(self.settings.folder) / "activations" / item.step
        folder.mkdir(parents=True, exist_ok=True)
        names = {name.replace("/", "|"): array for name, array in arrays.items()}
        rank = f".part{self.settings.part}" if self.settings.parts > 1 else ""
        np.savez(folder / f"{item.trajectory}{rank}.npz", tokens=item.tokens, versions=versions, **names)


def places(
    settings: Settings, columns: Mapping[str, Column]
) -> dict[str, tuple[tuple[int, int] | None, tuple[int, int]]]:
    """(First byte, bytes) in a row of each site's codes, if it keeps any, and scales."""
    at, spans = 0, {}
    for name, column in columns.items():
        spans[name] = (at, column.bytes)
        at += column.bytes
    return {s.name: (spans.get(f"{s.name}/codes"), spans[f"{s.name}/scales"]) for s in settings.sites}


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
