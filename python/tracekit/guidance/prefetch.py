"""Reading ahead of the trainer: a thread reads the next microbatches while this one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekit.errors import DataError
from tracekit.guidance.reader import GuidanceReader
from tracekit.guidance.record import BatchRecord


@dataclass(slots=True, frozen=True)
class Microbatch:
    """What one step reads: tokens `[starts[i], stops[i])` of `ids[i]`, checked against `token_ids` if given."""

    ids: Sequence[str]
    starts: Any = 0
    stops: Any = None
    token_ids: Any = None


def _pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array in pinned memory, which lives as long as the array."""
    import torch

    if not torch.cuda.is_available():
        raise DataError("pin_memory needs a CUDA device: read without it")
    kind = {np.uint8: torch.uint8, np.float32: torch.float32}[dtype]
    return torch.empty(shape, dtype=kind, pin_memory=True).numpy()


def microbatches(
    reader: GuidanceReader,
    plan: Iterable[Microbatch],
    sites: Sequence[str] | None = None,
    *,
    prefetch: int = 2,
    unpack: bool = True,
    heads: slice | None = None,
    allocate: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty,
    pin_memory: bool = False,
) -> Iterator[tuple[Microbatch, dict[str, BatchRecord]]]:
    """Yields every microbatch of the plan with its records, reading `prefetch` ahead.

    Only the asked tokens, sites and heads are read; the reading thread holds no GIL. `allocate(shape, dtype)` makes
    the arrays; `pin_memory` puts them in pinned memory, for `torch.from_numpy(a).to("cuda", non_blocking=True)`. An
    error of a read is raised when its microbatch is due; closing the generator ends the thread.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}: use 0 or more microbatches")
    if pin_memory:
        allocate = _pinned
    steps = iter(plan)
    waiting: deque[tuple[Microbatch, Future]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="guidance-prefetch")

    def start() -> None:
        for m in steps:
            job = pool.submit(
                reader.read_batch,
                m.ids,
                m.starts,
                m.stops,
                sites,
                m.token_ids,
                unpack,
                heads=heads,
                allocate=allocate,
            )
            waiting.append((m, job))
            return

    try:
        for _ in range(prefetch + 1):
            start()
        while waiting:
            m, job = waiting.popleft()
            records = job.result()
            start()
            yield m, records
    finally:
        pool.shutdown(cancel_futures=True)
