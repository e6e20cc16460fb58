"""Guidance from a GPU: bits are packed there, copied to pinned memory on a stream of their own, and written behind."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.guidance.writer import GuidanceWriter, TrajectoryWriter

ALIGN = 64


class PinnedRing:
    """`size` bytes of host memory, pinned if there is a GPU, lent out piece by piece and taken back in order."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._lent: deque[tuple[int, int]] = deque()  # (start, end), oldest first
        self._changed = threading.Condition()
        self._closed = False

    def _place(self, n: int) -> int | None:
        """Where n bytes fit now."""
        if not self._lent:
            return 0
        first, last = self._lent[0][0], self._lent[-1][1]
        if last > first:
            return last if last + n <= len(self.memory) else 0 if n < first else None
        return last if last + n < first else None

    def take(self, n: int) -> Tensor:
        """u8 `[n]` of the ring; waits until they are free."""
        if n > len(self.memory):
            text = f"{n} bytes do not fit a ring of {len(self.memory)}: append fewer tokens, or raise ring_bytes"
            raise ValueError(text)
        with self._changed:
            while (at := self._place(n)) is None:
                if self._closed:
                    raise DataError("the ring is closed")
                self._changed.wait()
            self._lent.append((at, at + n))
        return self.memory[at : at + n]

    def give(self) -> None:
        """Takes the oldest piece back."""
        with self._changed:
            self._lent.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, or comes to, gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(slots=True)
class _Job:
    """Something to do once `event` has happened; a piece of the ring is given back after it if tensors were sent."""

    run: Callable[[], Any]
    future: Future
    event: Any = None
    sent: list[Tensor] = field(default_factory=list)


class DeviceWriter:
    """Appends tensors of a GPU (or of the CPU) to the trajectories of a `GuidanceWriter`, in the order of the calls.

    `append` returns once the copies are queued on a side stream, which waits for the stream that made the tensors; it
    blocks only while the ring of `ring_bytes` is full. Its future is done when the rows are in the writer's queue, that
    of `commit` when they survive the death of the process. The first error of the writing thread is the result of its
    future and of every later one, and is raised by every later call.
    """

    def __init__(self, writer: GuidanceWriter, *, device: Any = "cuda", ring_bytes: int = 256 << 20) -> None:
        self.writer = writer
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None
        self._ring = PinnedRing(ring_bytes, pinned=cuda)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name="guidance-device", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DeviceWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(
        self,
        trajectory: TrajectoryWriter,
        site: str,
        tok0: int,
        codes: Tensor | None,
        scales: Tensor,
        token_scale: Tensor | None = None,
        packed: bool = False,
    ) -> "Future[None]":
        """`TrajectoryWriter.append` for tensors: codes u8 `[T, K]` or `[T, planes, K]`, or packed rows."""
        self._check()
        spec = self.writer.site(site)
        n = scales.shape[0]
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for t in (codes, scales, token_scale):
                if t is not None:  # the caller may free it before the side stream has read it
                    t.record_stream(self._stream)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            sent = []
            if codes is not None:
                if not packed:
                    # Imported here: kernels need more than the store does.
                    from tracekit.kernels.low_bits import pack_low_bits

                    codes = pack_low_bits(codes.reshape(n, spec.planes, spec.width), spec.bits)
                sent.append(codes)
            sent.append(scales)
            if token_scale is not None:
                sent.append(token_scale.to(torch.float32))
            arrays = self._send(sent)
            event = self._stream.record_event() if self._stream else None
        if token_scale is not None:
            arrays[-1] = arrays[-1].view(np.float32)
        rows = [None] * (codes is None) + arrays + [None] * (token_scale is None)

        def run() -> None:
            c, s, g = rows
            c = None if c is None else c.reshape(n, -1)
            trajectory.append(site, tok0, c, s.reshape(n, -1), g, packed=True)

        return self._put(_Job(run, Future(), event, sent))

    def _send(self, sources: list[Tensor]) -> list[np.ndarray]:
        """The bytes of tensors in one piece of the ring, on their way."""
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in sources]
        starts = np.cumsum([0, *(-(-f.numel() // ALIGN) * ALIGN for f in flat)])
        piece = self._ring.take(int(starts[-1]))
        arrays = []
        for f, start in zip(flat, starts[:-1].tolist(), strict=True):
            host = piece[start : start + f.numel()]
            host.copy_(f, non_blocking=True)
            arrays.append(host.numpy())
        return arrays

    def commit(self, trajectory: TrajectoryWriter, status: str = "complete", extra: Any = None) -> "Future[bool]":
        """Commits behind the trajectory's rows; the future's result is that of `Commit.result`."""
        self._check()
        return self._put(_Job(lambda: trajectory.commit(status, extra).result(), Future()))

    def flush(self) -> None:
        """Waits for everything that was appended or committed."""
        self._check()
        self._put(_Job(self.writer.flush, Future())).result()

    def close(self) -> None:
        """Waits for everything and ends the thread; the writer stays open. Raises the thread's error, if any."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
            self._ring.close()
        if self._error is not None:
            raise DataError(f"writing guidance from {self.device} failed: {self._error}") from self._error

    def _check(self) -> None:
        if self._thread is None:
            raise DataError("this device writer is closed: open another")
        if self._error is not None:
            raise DataError(f"writing guidance from {self.device} failed: {self._error}") from self._error

    def _put(self, job: _Job) -> Future:
        self._jobs.put(job)
        return job.future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.event is not None:
                    job.event.synchronize()
                if self._error is not None:
                    raise self._error
                result = job.run()
            except BaseException as e:
                self._error = self._error or e
                job.future.set_exception(e)
            else:
                job.future.set_result(result)
            finally:
                if job.sent:
                    self._ring.give()
