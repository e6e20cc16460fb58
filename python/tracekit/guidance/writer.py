"""Writing guidance."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from tracekit import _core
from tracekit.errors import DataError
from tracekit.guidance.batch import Batch, Prefix, flatten, whole_numbers
from tracekit.guidance.schema import ENCODINGS, GuidanceSchema, SiteSpec

AUDIT_EVERY = 1024
"""Tokens of which one is audited where nothing else is said."""


class QueueFullError(DataError):
    """The writer's queue is full and `on_full` is `raise`."""


class Commit:
    """A commit on its way to the disk."""

    def __init__(self, core: "_core.Commit") -> None:
        self._core = core

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        try:
            return self._core.wait(0) is not None
        except DataError:
            return True

    def result(self, timeout: float | None = None) -> bool:
        """Waits until the trajectory survives the death of the process: True. False: the queue was full and `on_full`
        is `drop`. Raises DataError if the writer failed, TimeoutError after `timeout` seconds."""
        answer = self._core.wait(timeout)
        if answer is None:
            raise TimeoutError(f"the commit has not reached the disk within {timeout} s")
        return answer


_CPU, _PINNED = 1, 3  # DLPack's device types


def _host(x: Any) -> np.ndarray:
    """x as an array: the same memory if x is an array, a CPU tensor, or has a buffer or DLPack; float8 as its bytes."""
    if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack_device__"):
        if x.__dlpack_device__()[0] not in (_CPU, _PINNED):
            raise ValueError("rows are not in host memory: append them with tracekit.guidance.DeviceWriter")
        if hasattr(x, "detach"):  # a torch tensor
            x = x.detach()
            x = x.view(sys.modules["torch"].uint8) if "float8" in str(x.dtype) else x
        try:
            x = np.from_dlpack(x)
        except (RuntimeError, BufferError) as e:
            raise ValueError(f"rows cannot be read ({e}): pass uint8") from e
    x = np.asarray(x)
    return x.view(np.uint8) if "float8" in x.dtype.name else x


def _u8(x: Any, what: str = "rows") -> np.ndarray:
    """x as contiguous bytes. Numbers that are no bytes are refused, never cut: a scale is the byte of its code."""
    if type(x) is np.ndarray and x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    x = _host(x)
    if x.dtype != np.uint8 and x.size:
        if x.dtype.kind not in "biu":
            raise ValueError(f"{what} has elements of {x.dtype}: pass uint8, of scales the bytes of their codes")
        if x.min() < 0 or x.max() > 255:
            raise ValueError(f"{what} has values from {x.min()} to {x.max()}: pass uint8, 0 to 255")
    return np.ascontiguousarray(x, dtype=np.uint8)


def _f32(x: Any) -> np.ndarray | None:
    return None if x is None else np.ascontiguousarray(_host(x), dtype=np.float32)


def _rows(site: SiteSpec, codes: Any, scales: Any, packed: bool) -> tuple[np.ndarray | None, np.ndarray]:
    """Codes and scales as bytes, token by token: other axes than `[T, K]` or `[T, planes, K]` are refused."""
    scales = _u8(scales, "scales")
    codes = None if codes is None else _u8(codes, "codes")
    n, planes = len(scales), site.planes
    for what, rows in (("scales", scales), ("codes", codes)):
        if rows is None or rows.ndim < 2:
            continue
        k = site.scale_row if rows is scales else site.code_row if packed else site.width
        # Where the number of bytes is wrong, the core says how many are needed.
        if rows.size == n * planes * k and rows.shape not in ((n, planes * k), (n, planes, k)):
            raise ValueError(f"{what} has shape {list(rows.shape)}, {n} tokens of {planes} x {k} are needed")
    return codes, scales


class GuidanceWriter:
    """Writes one process's part of a dataset; any number of writers share a folder.

    `dir` is created. A segment file is written as `*.tkg.open` and sealed to `*.tkg` by `close`, or when it reaches
    `roll_bytes`. A process that is killed loses no trajectory whose commit's result is True; `sync` says what a power
    loss may take: everything not sealed (`seal`), about a second (`interval`) or nothing (`commit`).

    `append` packs rows and queues them; `threads` threads encode and write. When `queue_bytes` wait, `append` blocks,
    gives the trajectory up (`drop`; its commit's result is False, `stats` counts it) or raises QueueFullError, having
    taken nothing. An error of a thread is raised by the next `append`, `commit`, `flush` or `close`. With `manifest`
    every seal writes the folder's next manifest.

    `fan_out` puts segments into one of 256 sub-folders, for datasets with very many writers. `io="direct"` bypasses the
    page cache (O_DIRECT), `io="uring"` writes by io_uring (builds with the Cargo feature `uring`); where that cannot
    be, segments are written the plain way and `close` warns. `stats` counts those written `as_asked`.

    Raises ValueError for arguments that do not fit the schema, DataError when the disk refuses.
    """

    def __init__(
        self,
        dir: Any,
        schema: GuidanceSchema,
        *,
        encoding: str = "lossless",
        queue_bytes: int = 2 << 30,
        on_full: str = "block",
        sync: str = "seal",
        chunk_tokens: int = 256,
        roll_bytes: int = 4 << 30,
        threads: int = 1,
        manifest: bool = False,
        fan_out: bool = False,
        io: str = "buffered",
    ) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding '{encoding}': use one of {', '.join(ENCODINGS)}")
        self.schema = schema
        self._numbers = {s.name: i for i, s in enumerate(schema.sites)}
        data = schema.pack(encoding, chunk_tokens)
        self._dir, self._io = os.fsdecode(dir), io
        self._core = _core.Writer(
            self._dir, data, sync, roll_bytes, queue_bytes, on_full, threads, manifest, fan_out, io
        )
        self._closed: dict[str, int] | None = None

    def __enter__(self) -> "GuidanceWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(
        self,
        traj_id: str,
        *,
        token_ids: Any,
        policy_version: int = 0,
        prefix: Prefix = None,
        part: tuple[int, int] = (0, 1),
    ) -> "TrajectoryWriter":
        """Begins a trajectory.

        `token_ids` int64 `[T]` are all its tokens from token 0 on, those of the prefix included. With
        `prefix=(id, len)` its rows start at token `len`, and the earlier ones are read from that trajectory. `part`
        is this rank's number and the number of ranks that each write some sites of it.
        """
        ids = whole_numbers(token_ids)
        return TrajectoryWriter(self, traj_id, self._core.begin(traj_id, ids, policy_version, prefix, part))

    def append_batch(
        self,
        ids: Sequence[str],
        token_ids: Sequence[Any] | tuple[Any, Any],
        tok0: Any,
        lengths: Any,
        sites: Mapping[str, tuple[Any, Any, Any]],
        policy_version: int | Sequence[int] = 0,
        prefixes: Sequence[Prefix] | None = None,
        *,
        packed: bool = False,
        status: str = "complete",
        audit: bool | int = False,
    ) -> None:
        """Begins, appends and commits many trajectories in one call.

        `token_ids`: one int64 array an id, each from token 0 on, or `(flat, offsets [N+1])`. `lengths [N]` are the
        numbers of recorded rows, from token `tok0 [N]` on, which is the prefix's length (0 without one). `sites` has
        every site of the schema: `(codes, scales, token_scale)`, rows of all trajectories one after another: codes u8
        `[sum T, planes * K]` (or packed rows; None for bits = 0), scales u8 `[sum T, planes * K / block]`, token_scale
        f32 `[sum T]` or None. When the call returns, all of them survive the death of the process. `audit`: see
        `TrajectoryWriter.append`.
        """
        n = len(ids)
        flat, offsets = flatten(token_ids)
        starts = np.broadcast_to(np.asarray(tok0, dtype=np.int64), (n,))
        prefixes = [None] * n if prefixes is None else list(prefixes)
        for i, (start, prefix) in enumerate(zip(starts.tolist(), prefixes, strict=True)):
            if start != (prefix[1] if prefix else 0):
                raise ValueError(f"trajectory '{ids[i]}': rows start at token {start}, its prefix is {prefix}")
        missing = [s.name for s in self.schema.sites if s.name not in sites]
        if missing or len(sites) != len(self.schema.sites):
            extra = [name for name in sites if name not in self._numbers]
            raise ValueError(f"a batch has the schema's sites: missing {missing[:4]}, unknown {extra[:4]}")
        policies = np.ascontiguousarray(np.broadcast_to(np.asarray(policy_version, dtype=np.int64), (n,)))
        counts = np.asarray(lengths).tolist()
        if every := audit_every(audit):
            audited = [
                len(_core.audit_tokens(i, a, a + n, every)) > 0 for i, a, n in zip(ids, starts, counts, strict=True)
            ]
            if any(audited):
                of = Batch(list(ids), flat, offsets, counts, dict(sites), policies, prefixes)
                self._append_each(of.select(np.flatnonzero(audited)), status, every)
                of = of.select(np.flatnonzero(~np.array(audited)))
                ids, flat, offsets, counts = of.ids, of.flat, of.offsets, of.counts
                sites, policies, prefixes = of.sites, of.policies, of.prefixes
        rows = []
        for s in self.schema.sites:
            codes, scales, token_scale = sites[s.name]
            whole = every and s.bits == 0  # codes that only audit records keep
            try:
                codes, scales = _rows(s, None if whole else codes, scales, packed)
            except ValueError as e:
                raise ValueError(f"site '{s.name}': {e}") from e
            rows.append((codes, packed, scales, _f32(token_scale)))
        self._core.append_batch(list(ids), flat, offsets, policies, prefixes, counts, rows, status)

    def _append_each(self, batch: Batch, status: str, every: int) -> None:
        """A batch one by one: audit records belong to trajectories that are still open."""
        commits, row = [], 0
        for i, traj_id in enumerate(batch.ids):
            tokens, prefix = batch.flat[batch.offsets[i] : batch.offsets[i + 1]], batch.prefixes[i]
            t = self.begin(traj_id, token_ids=tokens, policy_version=int(batch.policies[i]), prefix=prefix)
            rows = slice(row, row + batch.counts[i])
            for name, arrays in batch.sites.items():
                codes, scales, token_scale = (None if a is None else np.asarray(a)[rows] for a in arrays)
                t.append(name, prefix[1] if prefix else 0, codes, scales, token_scale, audit=every)
            commits.append(t.commit(status))
            row = rows.stop
        for traj_id, commit in zip(batch.ids, commits, strict=True):
            if not commit.result():
                raise QueueFullError(f"trajectory '{traj_id}' was dropped: the guidance queue is full")

    def append_rows(
        self,
        items: Sequence[tuple[str, Any, int, Any, Mapping[str, Any] | None]],
        columns: Mapping[str, tuple[tuple[int, int] | None, tuple[int, int]]],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Begins, appends and commits trajectories whose rows hold all sites side by side, as an engine keeps them.

        An item is (id, token_ids, policy_version, rows u8 `[T, R]` of tokens 0 on, extra); `columns` gives each site's
        (first byte, bytes) in a row: of its packed codes, None for bits = 0, and of its scales; `part` is as in
        `begin`. When the call returns, all of them survive the death of the process. It lets go of the GIL once, for
        all of the work: for threads beside one that must not wait.
        """
        if missing := [s.name for s in self.schema.sites if s.name not in columns]:
            raise ValueError(f"rows have the schema's sites: missing {missing[:4]}")
        widths = {_u8(rows).shape[1] for _, _, _, rows, _ in items}
        if len(widths) > 1:
            raise ValueError(f"rows of {sorted(widths)} bytes in one call")
        if not items:
            return
        ready = [
            (i, whole_numbers(ids), policy, _u8(rows), b"" if extra is None else msgpack.packb(extra))
            for i, ids, policy, rows, extra in items
        ]
        places = [columns[s.name] for s in self.schema.sites]
        if not self._core.append_rows(ready, widths.pop(), places, part):
            raise QueueFullError("trajectories were dropped: the guidance queue is full")

    def site(self, name: str) -> SiteSpec:
        """The schema's site of that name."""
        return self.schema.sites[self._number(name)]

    def _number(self, name: str) -> int:
        try:
            return self._numbers[name]
        except KeyError:
            raise DataError(f"site '{name}' is not in the writer's schema: it has {list(self._numbers)[:6]}") from None

    def flush(self, sync: bool = False) -> None:
        """Hands everything to the operating system and, if `sync`, to the disk."""
        self._core.flush(sync)

    def stats(self) -> dict[str, int]:
        """bytes (all segments), trajectories and tokens (committed), dropped, segments, as_asked, queued, queued_peak,
        stalls."""
        return self._closed or self._core.stats()

    def close(self) -> dict[str, int]:
        """Writes what is queued, seals all segments and returns the final `stats`.

        Trajectories without a commit are dropped and counted."""
        if self._closed is None:
            self._closed = self._core.close()
            if self._closed["as_asked"] < self._closed["segments"]:
                how = {"direct": "direct writes", "uring": "writes by io_uring"}[self._io]
                warnings.warn(f"{self._dir} takes no {how}: segments were written the plain way", stacklevel=2)
        return self._closed


class TrajectoryWriter:
    """One trajectory being written."""

    def __init__(self, writer: GuidanceWriter, traj_id: str, handle: int) -> None:
        self.writer = writer
        self.traj_id = traj_id
        self._handle = handle

    def append(
        self,
        site: str,
        tok0: int,
        codes: Any,
        scales: Any,
        token_scale: Any = None,
        packed: bool = False,
        audit: bool | int = False,
    ) -> None:
        """Appends rows of tokens `[tok0, tok0 + T)`, which follow the site's last ones.

        codes u8 `[T, K]` or `[T, planes, K]`, the low bits of each code (or packed rows with `packed`); scales u8
        `[T, K / block]` or `[T, planes, K / block]`; token_scale f32 `[T]` where the schema says per token.

        With `audit` the codes are whole, 0 to 15 and not packed: those of one token in `audit` (True: in 1 024; see
        `audit_tokens`) are kept with their scales in audit records, beside the low bits that the site keeps of every
        token.
        """
        number = self.writer._number(site)
        spec, token_scale = self.writer.schema.sites[number], _f32(token_scale)
        try:
            if not 0 <= tok0 < 1 << 32:
                raise ValueError(f"rows start at token {tok0}: use 0 to 2^32 - 1")
            codes, scales = _rows(spec, codes, scales, packed)
        except ValueError as e:
            raise ValueError(f"trajectory '{self.traj_id}', site '{site}': {e}") from e
        every = audit_every(audit)
        if every and (packed or codes is None):
            raise ValueError(f"trajectory '{self.traj_id}', site '{site}': an audit needs whole codes, not packed ones")
        kept = None if every and spec.bits == 0 else codes
        self.writer._core.append(self._handle, number, tok0, len(scales), (kept, packed, scales, token_scale))
        tokens = _core.audit_tokens(self.traj_id, tok0, tok0 + len(scales), every) if every else []
        if tokens:
            at = np.asarray(tokens) - tok0
            rows = (codes[at], False, scales[at], None if token_scale is None else token_scale[at])
            self.writer._core.audit(self._handle, number, tokens, rows)

    def commit(self, status: str = "complete", extra: dict[str, Any] | None = None) -> Commit:
        """Makes the trajectory readable; wait for `.result()` to be sure of it.

        `complete` needs equally many rows of every site; `truncated` and `aborted`
        keep the tokens that every site has. `extra` is the user's metadata, at most 64 KiB of msgpack."""
        data = b"" if extra is None else msgpack.packb(extra)
        return Commit(self.writer._core.commit(self._handle, status, data))

    def abandon(self) -> None:
        """Drops the trajectory: its rows are never readable."""
        self.writer._core.abandon(self._handle)


def audit_every(audit: bool | int) -> int:
    """One token in how many is audited; 0 for none."""
    every = AUDIT_EVERY if audit is True else int(audit)
    if every < 0:
        raise ValueError(f"audit = {audit}: give the number of tokens of which one is audited")
    return every
