"""A second reader, in plain Python: an implementation of docs/format.md that shares no code with the native one.

It needs numpy, msgpack and zstandard. It checks every checksum it passes and is made for being right and readable,
not fast. `pure_segment` reads a file, this a folder of them.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.errors import DataError
from tracekit.guidance.bits import unpack_rows
from tracekit.guidance.crc import crc32c
from tracekit.guidance.pure_segment import AUDIT, CHUNK, PureSegment, PureTrajectory, open_segment
from tracekit.guidance.record import AuditRows, SiteRecord, audit_rows


def _join_heads(records: list[SiteRecord]) -> SiteRecord:
    """One record of the heads that several ranks wrote."""
    if len(records) == 1 and records[0].site.planes == records[0].site.all_planes:
        return records[0]
    records = sorted(records, key=lambda r: r.site.first_plane)
    at, kept = 0, []
    for r in records:
        if r.site.first_plane == at:
            kept.append(r)
            at += r.site.planes
    site = kept[0].site if kept else records[0].site
    if at != site.all_planes:
        raise DataError(f"site '{site.name}': heads from {at} on are in no part: read heads that were recorded")

    def rows(name: str) -> np.ndarray | None:
        parts = [getattr(r, name) for r in kept]
        return None if parts[0] is None else np.concatenate(parts, 1)

    first = kept[0]
    return SiteRecord(
        site.joined, first.tokens, rows("codes"), rows("scales"), None, first.global_scale, rows("checks")
    )


class PureReader:
    """A folder of segments. `read` returns what `GuidanceReader[traj].read` does."""

    def __init__(self, dir: Any) -> None:
        self.dir = os.fspath(dir)
        files = [p for p in Path(dir).iterdir() if p.name.endswith((".tkg", ".tkg.open"))]
        files += [p for pattern in ("??/*.tkg", "??/*.tkg.open") for p in Path(dir).glob(pattern)]
        if not files:
            raise DataError(f"{dir} holds no guidance segments (*.tkg): give the folder that a writer wrote to")
        segments = [s for s in map(open_segment, files) if s is not None]
        self.segments = sorted(segments, key=lambda s: (s.created_ns, s.path))

    def ids(self) -> list[str]:
        """Ids of all committed trajectories."""
        return list(dict.fromkeys(t.traj_id for s in self.segments for t in s.trajectories))

    def find(self, traj_id: str) -> list[tuple[PureSegment, PureTrajectory]]:
        """The parts of a trajectory, the newest of each."""
        parts: dict[int, tuple[PureSegment, PureTrajectory]] = {}
        for segment in reversed(self.segments):
            for t in reversed(segment.trajectories):
                if t.traj_id == traj_id:
                    parts.setdefault(t.part[0], (segment, t))
        if not parts:
            raise DataError(f"trajectory '{traj_id}' is not in {self.dir}: check the id and the folder")
        n = next(iter(parts.values()))[1].part[1]
        if len(parts) < n:
            raise DataError(
                f"trajectory '{traj_id}' has {len(parts)} of {n} parts: wait until every rank has committed"
            )
        return list(parts.values())

    def read(
        self, traj_id: str, tokens: slice | None = None, sites: list[str] | None = None, token_ids: Any = None
    ) -> dict[str, SiteRecord]:
        """Reads tokens of some sites (all by default)."""
        parts = self.find(traj_id)
        end = parts[0][1].n_tokens
        start = 0 if tokens is None or tokens.start is None else tokens.start
        stop = end if tokens is None or tokens.stop is None else tokens.stop
        if not 0 <= start <= stop <= end or (tokens is not None and tokens.step not in (None, 1)):
            raise DataError(
                f"trajectory '{traj_id}' has records for tokens 0..{end}: ask for a range in it, not {tokens}"
            )
        ids = None if token_ids is None else np.asarray(token_ids, "<i8")
        pieces: dict[str, list[SiteRecord]] = {}
        for segment, t in parts:
            for site in segment.schema.sites:
                if sites is None or site.name in sites:
                    pieces.setdefault(site.name, []).append(self._site(segment, t, site, start, stop, ids))
        records = {name: _join_heads(records) for name, records in pieces.items()}
        missing = [s for s in sites or [] if s not in records]
        if missing:
            raise DataError(f"site '{missing[0]}' is not recorded in {self.dir}: add it to the writer's schema")
        return records

    def audit(self, traj_id: str) -> dict[str, AuditRows]:
        """The audited tokens of a trajectory by site."""
        rows: dict[str, list[tuple[int, bytes, bytes, float]]] = {}
        sites = {}
        for segment, t in self.find(traj_id):
            for c in (c for c in t.chunks if c.kind == AUDIT):
                for site in segment.schema.sites[c.site0 : c.site0 + c.nsites]:
                    codes, scales, token_scale, _ = segment.read_chunk(c)[site.name]
                    sites[site.name] = site
                    for i in range(c.ntok):
                        g = site.global_scale if token_scale is None else float(token_scale[i])
                        whole = unpack_rows(codes[i], 4, site.width).tobytes()
                        rows.setdefault(site.name, []).append((c.tok0 + i, whole, scales[i].tobytes(), g))
        return {name: audit_rows(sites[name], sorted(r)) for name, r in sorted(rows.items())}

    def _site(self, segment, t, site, start, stop, ids) -> SiteRecord:
        number = segment.schema.sites.index(site)
        pieces, at = [], start
        if start < t.first:
            cut = min(stop, t.first)
            before = self.read(t.prefix, slice(start, cut), [site.name], ids)[site.name]
            heads = slice(site.first_plane, site.first_plane + site.planes)
            rows = (None if r is None else r[:, heads] for r in (before.codes, before.scales, before.checks))
            codes, scales, checks = rows
            pieces.append((codes, scales, before.token_scale, checks))
            at = cut
        for c in t.chunks:
            a, b = max(start, c.tok0), min(stop, c.tok0 + c.ntok)
            if c.kind != CHUNK or not c.site0 <= number < c.site0 + c.nsites or a >= b:
                continue
            if a != at:
                break
            at = b
            if ids is not None and crc32c(ids[c.tok0 : c.tok0 + c.ntok].tobytes()) != c.token_crc:
                where = f"trajectory '{t.traj_id}': tokens {c.tok0}..{c.tok0 + c.ntok}"
                raise DataError(f"{where} are not those its record was made for: check the id")
            rows = segment.read_chunk(c)[site.name]
            pieces.append(tuple(None if r is None else r[a - c.tok0 : b - c.tok0] for r in rows))
        if at < stop:
            raise DataError(
                f"{segment.path}: trajectory '{t.traj_id}' has no valid chunk of site '{site.name}' for token {at}; "
                "run `tracekit guidance verify` on its folder"
            )
        joined = [None if p[0] is None else np.concatenate(p) for p in zip(*pieces, strict=True)] if pieces else []
        if not joined:
            shape = (0, site.planes)
            codes = np.zeros((*shape, site.code_row), np.uint8) if site.bits else None
            token_scale = np.zeros(0, "<f4") if site.global_scale is None else None
            checks = np.zeros((*shape, site.n_checks), "<u2") if site.n_checks else None
            joined = [codes, np.zeros((*shape, site.scale_row), np.uint8), token_scale, checks]
        codes, scales, token_scale, checks = joined
        return SiteRecord(site, range(start, stop), codes, scales, token_scale, site.global_scale, checks)
