"""Numbers of a run: one JSON object a step in metrics.jsonl, one aligned line a step on the console."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "6.3f"),
    ("acc", "reward/accuracy", "6.3f"),
    ("|dlogp|", "mismatch/logprob_abs_diff_mean", "8.5f"),
    ("rho>cap", "correction/clip_frac", "7.4f"),
    ("clip", "policy/clip_frac", "6.4f"),
    ("resp len", "response_length/mean", "8.2f"),
    ("grad", "actor/grad_norm", "7.3f"),
    ("guid B/tok", "guidance/bytes_per_token", "10.1f"),
    ("s/step", "time/step", "6.2f"),
)
"""Console columns: title, metric, format. A metric that a step lacks prints as a dash."""

HEADER_EVERY = 20
"""Step lines between two headers."""


class StepLog:
    """Writes a run's metrics and tells a person how it goes.

    `metrics` gets one JSON object a line, flushed; numbers that are not finite become null. `text` (the run's
    log file) gets every console line. The console shows a progress bar where it is a terminal, else plain lines.
    """

    def __init__(
        self,
        metrics: Path | None = None,
        text: Path | None = None,
        *,
        stream: TextIO | None = None,
        total_steps: int | None = None,
        tty: bool | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._path = metrics
        self._metrics = open(metrics, "a") if metrics else None  # noqa: SIM115 (closed by close)
        self._text = open(text, "a") if text else None  # noqa: SIM115
        self._total_steps = total_steps
        self._lines = 0
        self._times: dict[str, float] = defaultdict(float)
        for line in self.recorded():  # a resumed run's table is about all of its steps
            self._add_times(line)
        self._bar = _Bar(self._stream) if (self._stream.isatty() if tty is None else tty) else None
        self._steps_task: Any = None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record step `step` (from 1). Values are numbers or one-element tensors."""
        values = {key: _plain(value) for key, value in metrics.items()}
        self._record({"step": step, "time": round(time.time(), 3), **values})
        self._add_times(values)
        if self._lines % HEADER_EVERY == 0:
            self._print(_header())
        self._lines += 1
        self._print(_row(step, values))
        if self._bar:
            if self._steps_task is None:
                self._steps_task = self._bar.add("steps", self._total_steps)
            self._bar.update(self._steps_task, step)

    def event(self, name: str, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Record something that is not a step (an evaluation, the end of the warm start), without a console line."""
        values = {key: _plain(value) for key, value in metrics.items()}
        where = {} if step is None else {"step": step}
        self._record({"event": name, **where, "time": round(time.time(), 3), **values})

    def note(self, text: str) -> None:
        """One line for the person, and for the log file."""
        self._print(text)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """A named stretch of `total` units (warm start, evaluation): `with log.phase(...) as p: p.advance(1, loss=x)`.

        Plain output is one line about every tenth of it, at most one in two seconds, and one at its end.
        """
        phase = Phase(self, name, total)
        try:
            yield phase
        except BaseException:
            phase._close(done=False)
            raise
        phase._close(done=True)

    def final(self, rows: Sequence[Sequence[Any]]) -> None:
        """The last table. A row is (label, value) or (label, before, after); the `time/*` totals of the steps follow,
        as shares of `time/step`. All of it is also the last line of metrics.jsonl (`"event": "final"`)."""
        pairs = [row for row in rows if len(row) > 2]
        for table in ([("", "before", "after"), *pairs] if pairs else [], [row for row in rows if len(row) == 2]):
            for line in _table([[_cell(cell) for cell in row] for row in table]):
                self._print(line)
        times = self.times()
        parts = {key[5:]: spent for key, spent in times.items() if key != "time/step"}
        whole = times.get("time/step") or sum(parts.values())
        if parts and whole:
            parts["other"] = max(whole - sum(parts.values()), 0.0)
            self._print(f"where the time of the steps went, {whole:.1f} s")
            largest_first = sorted(parts.items(), key=lambda item: -item[1])
            for line in _table(
                [[key, f"{spent:.1f} s", f"{100 * spent / whole:.0f} %"] for key, spent in largest_first]
            ):
                self._print(line)
        cells = {str(row[0]): [_plain(cell) for cell in row[1:]] for row in rows}
        self.event("final", {"rows": cells, "times": {key: round(spent, 3) for key, spent in times.items()}})

    def times(self) -> dict[str, float]:
        """Seconds under each `time/*` metric, over all steps of the run."""
        return dict(self._times)

    def recorded(self) -> Iterator[dict[str, Any]]:
        """The metrics of each step of the run, those before a resume too, as metrics.jsonl has them."""
        if self._path is None:
            return
        for line in self._path.read_text().splitlines():
            values = json.loads(line)
            if "event" not in values:
                yield values

    def _add_times(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key.startswith("time/") and isinstance(value, int | float):
                self._times[key] += value

    def close(self) -> None:
        """Stop the progress bar and close the files."""
        if self._bar:
            self._bar.stop()
        for file in (self._metrics, self._text):
            if file and not file.closed:
                file.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, values: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(json.dumps(values, allow_nan=False) + "\n")
            self._metrics.flush()

    def _print(self, line: str) -> None:
        if self._text:
            self._text.write(line + "\n")
            self._text.flush()
        if self._bar:
            self._bar.print(line)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


class Phase:
    """Progress of one `StepLog.phase`."""

    def __init__(self, log: StepLog, name: str, total: int | None) -> None:
        self._log, self._name, self._total = log, name, total
        self._done, self._values = 0, {}
        self._start = self._last_time = time.monotonic()
        self._last_done = 0
        self._task = log._bar.add(name, total) if log._bar else None

    def advance(self, count: int = 1, **values: Any) -> None:
        """`count` more units are done; `values` are shown with them (loss=..., acc=...)."""
        self._done += count
        self._values |= {key: _plain(value) for key, value in values.items()}
        if self._log._bar:
            self._log._bar.update(self._task, self._done)
            return
        now = time.monotonic()
        tenth = self._total and self._done - self._last_done >= self._total / 10
        if self._done != self._total and (tenth or not self._total) and now - self._last_time >= 2:
            self._last_time, self._last_done = now, self._done
            self._log._print(self._line())

    def _close(self, *, done: bool) -> None:
        if self._log._bar:
            self._log._bar.remove(self._task)
        seconds = time.monotonic() - self._start
        self._log._print(f"{self._line()}  {seconds:.1f} s{'' if done else '  (stopped)'}")

    def _line(self) -> str:
        count = f"{self._done}/{self._total}" if self._total else f"{self._done}"
        values = "".join(f"  {key} {_cell(value)}" for key, value in self._values.items())
        return f"{self._name:<12} {count:>11}{values}"


class Timer:
    """Seconds of named sections. A section inside another counts for itself only, so that the parts add up.

    with timer.section("rollout"): ...
    metrics |= timer.take()        # {"time/rollout": 1.2, "time/step": 1.9}
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the seconds of this block, less those of sections in it, to `time/<name>`."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._spent[f"time/{name}"] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def take(self) -> dict[str, float]:
        """The seconds since the last `take`: each section's, and all of them as `time/step`. Starts anew."""
        now = time.perf_counter()
        taken = {**self._spent, "time/step": now - self._since}
        self._spent.clear()
        self._since = now
        return taken


class _Bar:
    """The progress bar of a terminal; lines are printed above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=stream, force_terminal=True, highlight=False, markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._running = False

    def add(self, name: str, total: int | None) -> Any:
        if not self._running:
            self._progress.start()
            self._running = True
        return self._progress.add_task(name, total=total)

    def update(self, task: Any, done: int) -> None:
        self._progress.update(task, completed=done)

    def remove(self, task: Any) -> None:
        self._progress.remove_task(task)

    def print(self, line: str) -> None:
        self._progress.console.print(line, soft_wrap=True)

    def stop(self) -> None:
        if self._running:
            self._progress.stop()
            self._running = False


def _plain(value: Any) -> Any:
    """JSON's own types; a tensor of one element gives its number, a number that is not finite gives None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _width(form: str, title: str) -> int:
    return max(int(form.partition(".")[0]), len(title))


def _header() -> str:
    return "  ".join([f"{'step':>5}", *(f"{title:>{_width(form, title)}}" for title, _, form in COLUMNS)])


def _row(step: int, values: Mapping[str, Any]) -> str:
    cells = [f"{step:>5}"]
    for title, key, form in COLUMNS:
        value = values.get(key)
        text = "-" if value is None else format(float(value), "." + form.partition(".")[2])
        cells.append(f"{text:>{_width(form, title)}}")
    return "  ".join(cells)


def _cell(value: Any) -> str:
    value = _plain(value)
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    columns = max(len(row) for row in rows)
    full = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(columns)]
    for row in full:
        first = f"  {row[0]:<{widths[0]}}"
        yield "  ".join([first, *(f"{cell:>{widths[i + 1]}}" for i, cell in enumerate(row[1:]))]).rstrip()
