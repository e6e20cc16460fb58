"""What the plugin costs the scheduler's thread, as lines of a file: for measurements, off unless asked for."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "TRACEKIT_SGLANG_STOPWATCH"
"""Environment variable: a file to append to."""
EVERY = 0.25
"""Seconds between lines."""


class Stopwatch:
    """Adds up the time spent in the functions that it wraps; a line is {"at", "seconds", "forwards"}, all so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.forwards, self._written = path, 0.0, 0, 0.0

    @classmethod
    def from_environment(cls) -> Stopwatch | None:
        """The one that the environment asks for."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path)) if path else None

    def wrap(self, function: Callable[..., Any], *, forward: bool = False) -> Callable[..., Any]:
        """`function`, timed; `forward` for the one that runs once a forward."""

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                now = time.perf_counter()
                self.seconds += now - start
                self.forwards += forward
                if now - self._written > EVERY:
                    self._written = now
                    self._write(now)

        return timed

    def _write(self, now: float) -> None:
        line = {"at": now, "seconds": self.seconds, "forwards": self.forwards, "pid": os.getpid()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def busy_share(path: Path, first: float, last: float) -> float:
    """Share of the wall time between `first` and `last` (time.perf_counter) that the wrapped functions took, over the
    lines in between. Raises ValueError with fewer than two of them."""
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if first <= line["at"] <= last]
    if len(lines) < 2:
        raise ValueError(f"{path}: {len(lines)} lines between {first} and {last}")
    return (lines[-1]["seconds"] - lines[0]["seconds"]) / (lines[-1]["at"] - lines[0]["at"])
