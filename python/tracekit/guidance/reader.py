"""Reading guidance."""

import asyncio
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from tracekit import _core
from tracekit.errors import DataError
from tracekit.guidance.batch import flatten
from tracekit.guidance.record import AuditRows, BatchRecord, SiteRecord, audit_rows
from tracekit.guidance.schema import GuidanceSchema, SiteSpec

_MANY = 1 << 16
"""Rows from which on a request's ranges are checked before memory is allocated for them."""


class GuidanceReader:
    """A folder of segments, read as one. It can be used after a fork, and pickles as its path: it holds open files, or
    a store's connections that each process makes for itself. Writers may still be writing: what was committed when it
    was opened is readable; `refresh` looks anew. See `open_dataset`."""

    def __init__(
        self, dir: Any, *, mmap: bool = False, manifest: bool = False, gap: int = 1 << 20, retries: int = 6
    ) -> None:
        self.dir = os.fsdecode(dir)
        self.mmap = mmap
        self._how = {"mmap": mmap, "manifest": manifest, "gap": gap, "retries": retries}
        self._open()

    def _open(self) -> None:
        core = _core.Reader(self.dir, **self._how)
        self.manifest: int | None
        """Number of the manifest that it was opened by; None if by what lies in the folder."""
        self.manifest, refused = core.manifest()
        for why in refused:
            warnings.warn(f"an older manifest is read: {why}", stacklevel=3)
        segments = core.segments()
        sites: dict[str, SiteSpec] = {}
        mixed: set[str] = set()
        for segment in segments:
            for offset, end, what, _ in segment["damage"]:
                text = f"{segment['path']}: bytes {offset}..{end} are damaged ({what}); see tracekit guidance verify"
                warnings.warn(text, stacklevel=3)
            for site in GuidanceSchema.unpack(segment["schema"]).sites:
                known = sites.setdefault(site.name, site.joined)
                if known.global_scale != site.global_scale:
                    mixed.add(site.name)
        # Complete before anything is replaced: other threads may be reading.
        layouts: dict[str, _Layout] = {}
        self._segments, self._mixed, self._layouts, self._sites, self._core = segments, mixed, layouts, sites, core

    def refresh(self) -> None:
        """Opens the folder again, to see what was committed since."""
        self._open()

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        return self.dir, self._how

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        self.__init__(state[0], **state[1])

    def __len__(self) -> int:
        return len(self._core)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids())

    def __contains__(self, traj_id: str) -> bool:
        return self._core.contains(traj_id)

    def __getitem__(self, traj_id: str) -> "Trajectory":
        return Trajectory(self, traj_id, self._core.find(traj_id))

    def ids(self) -> list[str]:
        """Ids of all trajectories whose parts are all committed, each once, in the order in which they were begun."""
        return list(dict.fromkeys(self._core.ids()))

    @property
    def sites(self) -> Mapping[str, SiteSpec]:
        """The sites that some segment records."""
        return self._sites

    @property
    def segments(self) -> list[dict[str, Any]]:
        """One dict a segment: path, bytes, sealed, trajectories, chunks, version, created_ns, damage, schema."""
        return [{**s, "schema": GuidanceSchema.unpack(s["schema"])} for s in self._segments]

    def site(self, name: str) -> SiteSpec:
        """The site of that name; DataError if no segment records it."""
        if name not in self._sites:
            few = ", ".join(list(self._sites)[:6])
            raise DataError(
                f"site '{name}' is not recorded in {self.dir}: it has {len(self._sites)} sites ({few} …); add it to "
                "the writer's schema"
            )
        return self._sites[name]

    def lengths(self, ids: Sequence[str]) -> np.ndarray:
        """int64 `[N]`: tokens of each trajectory that have a record (the last sampled token has none)."""
        return np.asarray(self._core.lengths(list(ids)), dtype=np.int64)

    def read_batch(
        self,
        ids: Sequence[str],
        starts: Any = 0,
        stops: Any = None,
        sites: Sequence[str] | None = None,
        token_ids: Any = None,
        unpack: bool = True,
        out: Mapping[str, tuple[Any, Any, Any]] | None = None,
        heads: slice | None = None,
        allocate: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty,
    ) -> dict[str, BatchRecord]:
        """Reads tokens `[starts[i], stops[i])` of `ids[i]`, in request order, in one call that does not hold the GIL.

        `stops=None` reads to each record's end; ids may repeat; tokens of a prefix come from the prefix's record.
        `token_ids` (one int64 array a request, from the trajectory's token 0 on, or `(flat, offsets)`) are compared
        with the hash of every chunk that is touched. `heads` picks planes of sites that have more than one. `out`
        gives C-contiguous arrays of the result's shapes to write into, per site `(codes, scales, token_scale)`;
        otherwise `allocate(shape, dtype)` makes them.

        Raises DataError naming the trajectory, site or tokens when something is missing, other or damaged.
        """
        if isinstance(ids, str) or isinstance(sites, str):
            raise ValueError("ids and sites are lists of names, not one name")
        ids = list(ids)
        n = len(ids)
        names = list(self._sites) if sites is None else list(sites)
        first = _each(starts, n)
        last = self._core.lengths(ids) if stops is None else _each(stops, n)
        rows = sum(last) - sum(first)
        if not 0 <= rows < _MANY or min(first, default=0) < 0:
            self._check_ranges(ids, first, last)
        results, outs = {}, []
        for name in names:
            layout = self._layouts.get(name) or self._layout(name)
            h0, h1 = (0, layout.planes) if heads is None else _head_range(layout.site, heads)
            planes = h1 - h0
            checks = np.empty((rows, planes, layout.n_checks), "<u2") if layout.n_checks else None
            if out is not None and name in out:
                record = BatchRecord(*out[name], checks, layout.site)
            else:
                width = layout.width if unpack else layout.code_row
                codes = allocate((rows, planes, width), np.uint8) if width else None
                scales = allocate((rows, planes, layout.scale_row), np.uint8)
                token_scale = allocate((rows,), np.float32) if layout.dynamic else None
                record = BatchRecord(codes, scales, token_scale, checks, layout.site)
            results[name] = record
            raw = None if checks is None else checks.view(np.uint8)
            outs.append((record.codes, record.scales, record.token_scale, raw, (h0, h1)))
        tokens = None if token_ids is None else flatten(token_ids)
        self._core.read_batch(ids, first, last, names, outs, unpack, tokens)
        return results

    def _check_ranges(self, ids: list[str], first: list[int], last: list[int]) -> None:
        """The core checks every range, but memory is allocated before; here for what is too much or nonsense."""
        for traj_id, start, stop, n in zip(ids, first, last, self._core.lengths(ids), strict=False):
            if not 0 <= start <= stop:
                raise ValueError(f"trajectory '{traj_id}': tokens {start}..{stop}: use 0 <= start <= stop")
            if stop > n:
                raise DataError(
                    f"trajectory '{traj_id}' has records for tokens 0..{n}, {start}..{stop} was asked for: ask for "
                    "tokens that it has"
                )

    def _layout(self, name: str) -> "_Layout":
        site = self.site(name)
        layout = self._layouts[name] = _Layout(
            site=site,
            planes=site.planes,
            width=site.width if site.bits else 0,
            code_row=site.code_row,
            scale_row=site.scale_row,
            n_checks=site.n_checks,
            dynamic=site.global_scale is None or name in self._mixed,
        )
        return layout

    def audit(self, traj_id: str) -> dict[str, AuditRows]:
        """The audited tokens of a trajectory by site: those that its writer was given whole codes of."""
        rows: dict[str, list[tuple[int, bytes, bytes, float]]] = {}
        for name, *row in self._core.audit(traj_id):
            rows.setdefault(name, []).append(tuple(row))
        return {name: audit_rows(self.site(name), r) for name, r in rows.items()}

    async def aread_batch(self, *args: Any, **kwargs: Any) -> dict[str, BatchRecord]:
        """`read_batch` in a thread of the running event loop's pool; the loop goes on meanwhile."""
        return await asyncio.to_thread(self.read_batch, *args, **kwargs)


@dataclass(slots=True)
class _Layout:
    """What a read needs of a site, worked out once."""

    site: SiteSpec
    planes: int
    width: int
    """Values of a row; 0 where there are no codes."""
    code_row: int
    scale_row: int
    n_checks: int
    dynamic: bool


def _each(value: Any, n: int) -> list[int]:
    """One number a request, of a number or n of them."""
    if isinstance(value, int):
        return [value] * n
    values = value if isinstance(value, list) else np.asarray(value).tolist()
    return values if isinstance(values, list) else [values] * n


def _head_range(site: SiteSpec, heads: slice | None) -> tuple[int, int]:
    if heads is None or site.planes == 1:
        return 0, site.planes
    start, stop, step = heads.indices(site.planes)
    if step != 1 or stop < start:
        raise ValueError(f"site '{site.name}': heads {heads} must be a forward slice of step 1")
    return start, stop


class Trajectory:
    """One committed trajectory."""

    def __init__(self, reader: GuidanceReader, traj_id: str, parts: list[dict[str, Any]]) -> None:
        self.reader = reader
        self.traj_id = traj_id
        self.parts = parts
        head = parts[0]
        self.n_tokens: int = head["n_tokens"]
        """Tokens that have a record, those of the prefix included."""
        self.n_ids: int = head["n_ids"]
        """Tokens it was begun with; the last sampled one has no record."""
        self.prefix: tuple[str, int] | None = head["prefix"]
        self.policy_version: tuple[int, int] = head["policy_version"]
        """Oldest and newest."""
        self.status: str = head["status"]

    @property
    def extra(self) -> dict[str, Any] | None:
        """What `commit` was given."""
        data = self.parts[0]["extra"]
        try:
            return msgpack.unpackb(data, strict_map_key=False) if data else None
        except ValueError as e:
            raise DataError(f"trajectory '{self.traj_id}': its extra is no msgpack ({e}): write it with commit") from e

    def read(
        self,
        tokens: slice | None = None,
        sites: Sequence[str] | None = None,
        token_ids: Any = None,
        heads: slice | None = None,
    ) -> dict[str, SiteRecord]:
        """Reads a range of tokens of some sites (all by default); see `GuidanceReader.read_batch`."""
        start, stop = 0, self.n_tokens
        if tokens is not None:
            if getattr(tokens, "step", 0) not in (None, 1):
                raise ValueError(f"tokens is {tokens}: use a slice of step 1")
            start = 0 if tokens.start is None else tokens.start
            stop = self.n_tokens if tokens.stop is None else tokens.stop
            if start < 0 or stop < start:
                raise ValueError(f"tokens {start}..{stop}: use 0 <= start <= stop")
        ids = None if token_ids is None else [token_ids]
        batch = self.reader.read_batch([self.traj_id], [start], [stop], sites, ids, unpack=False, heads=heads)
        records = {}
        for name, b in batch.items():
            site = self.reader.site(name)
            fixed = site.global_scale if b.token_scale is None else None
            records[name] = SiteRecord(site, range(start, stop), b.codes, b.scales, b.token_scale, fixed, b.checks)
        return records

    async def aread(self, *args: Any, **kwargs: Any) -> dict[str, SiteRecord]:
        """`read` in a thread of the running event loop's pool; the loop goes on meanwhile."""
        return await asyncio.to_thread(self.read, *args, **kwargs)


def open_dataset(
    dir: Any, *, mmap: bool = False, manifest: bool = False, gap: int = 1 << 20, retries: int = 6
) -> GuidanceReader:
    """Opens the folder that writers wrote to, or the `s3://`, `gs://` or `file://` url that it was published under.

    A folder is opened by what lies in it, unsealed segments too. With `manifest` it is opened by its newest valid
    manifest: the same sealed segments for everybody, while writers go on; without one, by what lies in it. `mmap` reads
    from a memory map instead of by `pread`: one copy less, for folders on local disks. A mapped file must not be
    shortened while it is read; no writer of ours does.

    A url is always opened by its newest manifest; ranges with at most `gap` bytes between them are read in one request,
    and a request that the store refuses for now is repeated `retries` times. Credentials and endpoint come from the
    usual environment variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` …, `GOOGLE_APPLICATION_CREDENTIALS`).

    DataError, naming file or key, if there is nothing to open or it does not pass its checks.
    """
    return GuidanceReader(dir, mmap=mmap, manifest=manifest, gap=gap, retries=retries)


def verify(dir: Any) -> list[dict[str, Any]]:
    """Checks every byte of every segment: one dict a file with path, bytes, records, trajectories, sealed and damage,
    a list of `(offset, end, what, torn_tail)`."""
    return _core.verify(_folder(dir, "verify"))


def recover(dir: Any) -> list[dict[str, Any]]:
    """Rebuilds the index of every segment that has none, in a file beside it; the segment is not touched.

    One dict a file: path, trajectories (committed and readable), torn_bytes (what a killed writer left unfinished),
    interior (damage elsewhere, as in `verify`), sidecar (the index file written, or None)."""
    return _core.recover(_folder(dir, "recover"))


def _folder(dir: Any, command: str) -> str:
    place = os.fsdecode(dir)
    if "://" in place:
        raise DataError(f"{place} is a url: {command} the folder that it was published from")
    return place
