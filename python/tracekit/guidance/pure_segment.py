"""A segment file in plain Python, for `pure`: header, records, index and chunks of docs/format.md."""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

from tracekit.errors import DataError
from tracekit.guidance.bits import pack_rows, unpack_rows
from tracekit.guidance.crc import crc32c
from tracekit.guidance.schema import GuidanceSchema, SiteSpec

MAGIC = b"\x89TKG\r\n\x1a\n"
CHUNK, TRAJ, AUDIT = 1, 2, 3
FLAG_PLANES, FLAG_ZTAIL = 1, 2
STATUS = ("complete", "truncated", "aborted")
_NONSENSE = (struct.error, ValueError, TypeError, IndexError, zstandard.ZstdError)
"""What bytes raise whose checksums hold and that no writer wrote."""


@dataclass(slots=True)
class Chunk:
    """Where a chunk lies and what it covers."""

    traj: int
    site0: int
    nsites: int
    tok0: int
    ntok: int
    off: int
    size: int
    kind: int
    flags: int
    crc: int
    token_crc: int


@dataclass(slots=True)
class PureTrajectory:
    """A commit."""

    number: int
    traj_id: str
    prefix: str
    first: int
    n_tokens: int
    n_ids: int
    policy_version: tuple[int, int]
    status: str
    part: tuple[int, int]
    extra: Any
    chunks: list[Chunk] = field(default_factory=list)


def open_segment(path: Path) -> "PureSegment | None":
    """The segment; None if it is not sealed and never got a record, as it ends within its head or holds only zeros from
    one of the head's pages on (a power cut kept the length and lost the data)."""
    try:
        return PureSegment(path)
    except FileNotFoundError:
        return PureSegment(path.with_suffix(""))  # sealed since it was listed
    except DataError:
        if path.suffix == ".tkg" or not _recordless(path.read_bytes()):
            raise
        return None


def _header_holds(data: bytes) -> bool:
    return crc32c(data[:4092]) == struct.unpack_from("<I", data, 4092)[0]


def _first_record(data: bytes) -> int:
    return 4096 + -(-struct.unpack_from("<I", data, 64)[0] // 8) * 8


def _recordless(data: bytes) -> bool:
    if len(data) < 4096:
        return True
    first_record = _first_record(data) if data[:8] == MAGIC and _header_holds(data) else 1
    return len(data) < first_record or not any(data[(first_record - 1) // 4096 * 4096 :])


class PureSegment:
    """One segment file, wholly in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = data = path.read_bytes()
        if data[:8] != MAGIC or len(data) < 4096:
            raise self._bad(0, "this is not a guidance segment")
        if not _header_holds(data):
            raise self._bad(0, "header checksum")
        major, minor, _, incompat, _, self.uuid, self.created_ns, _, length, crc = struct.unpack_from(
            "<HHIQQ16sQQII", data, 8
        )
        self.version = (major, minor)
        if major != 1 or incompat & ~3:
            raise DataError(f"{path} has format {major}.{minor}, features {incompat:#x}: use a newer tracekit")
        self.first_record = _first_record(data)
        if crc32c(data[4096 : self.first_record]) != crc:
            raise self._bad(4096, "schema checksum")
        self.schema = GuidanceSchema.unpack(data[4096 : 4096 + length])
        self.sealed = path.suffix == ".tkg"
        try:
            self.trajectories = self._from_index() if self.sealed else None
            if self.trajectories is None:
                self.trajectories = self._from_records()
        except _NONSENSE as e:
            raise self._bad(self.first_record, f"records or index do not parse ({e})") from e

    def _bad(self, offset: int, what: str) -> DataError:
        return DataError(
            f"{self.path} is damaged at byte {offset}: {what}; run `tracekit guidance verify` on its folder"
        )

    def _from_index(self) -> list[PureTrajectory] | None:
        data = self.data
        post = data[-64:]
        if post[:4] != b"TKP1" or post[56:] != b"TKGEND\r\n":
            return None
        off, length, file_len, uuid, n_chunks, n_trajs, index_crc, crc = struct.unpack_from("<QQQ8sIIII", post, 8)
        if crc32c(post[:52] + b"\0\0\0\0" + post[56:]) != crc or uuid != self.uuid[:8] or file_len != len(data):
            return None
        index = data[off : off + length]
        if off + length != len(data) - 64 or crc32c(index) != index_crc:
            return None
        chunks = [self._chunk_entry(index, 48 * i) for i in range(n_chunks)]
        heap = 48 * n_chunks + 68 * n_trajs
        found = []
        for i in range(n_trajs):
            number, n_tokens, n_ids, first, c0, cn, p0, p1, at, extra, idl, prl, status, _, part, parts = (
                struct.unpack_from("<IIIIIIqqQIBBBBHH", index, 48 * n_chunks + 64 * i)
            )
            text = index[heap + at :]
            t = _trajectory(number, text, idl, prl, extra, first, n_tokens, n_ids, (p0, p1), status, (part, parts))
            t.chunks = chunks[c0 : c0 + cn]
            found.append(t)
        return found

    @staticmethod
    def _chunk_entry(index: bytes, at: int) -> Chunk:
        traj, site0, nsites, tok0, ntok, off, size, kind, flags, _, crc, token_crc, _ = struct.unpack_from(
            "<IHHIIQIBBHIIQ", index, at
        )
        return Chunk(traj, site0, nsites, tok0, ntok, off, size, kind, flags, crc, token_crc)

    def _from_records(self) -> list[PureTrajectory]:
        """Hops from header to header; behind damage, goes on at the next header that holds."""
        data, at, seq = self.data, self.first_record, 0
        chunks: list[Chunk] = []
        found = []
        while at + 64 <= len(data):
            head = data[at : at + 64]
            kind, flags, size, number, uuid, crc, traj, tok0, ntok, site0, nsites, token_crc = struct.unpack_from(
                "<BBxxQQ8sIIIIHHI", head, 4
            )
            end = at + 64 + -(-size // 8) * 8
            if (
                head[:4] != b"TKR1"
                or crc32c(head[:60]) != struct.unpack_from("<I", head, 60)[0]
                or uuid != self.uuid[:8]
                or number < seq
                or end > len(data)
            ):
                at = data.find(b"TKR1", at + 1)
                while at >= 0 and at % 8:
                    at = data.find(b"TKR1", at + 1)
                if at < 0:
                    break
                continue
            if self._payload_crc(data[at + 64 : end], kind, flags, size, site0, nsites) != crc:
                at, seq = end, number + 1
                continue
            if kind in (CHUNK, AUDIT):
                chunks.append(Chunk(traj, site0, nsites, tok0, ntok, at, size, kind, flags, crc, token_crc))
            elif kind == TRAJ:
                n_tokens, n_ids, first, _, p0, p1, status, idl, prl, _, part, parts, extra = struct.unpack_from(
                    "<IIIIqqBBBBHHI", data, at + 64
                )
                text = data[at + 64 + 44 :]
                found.append(
                    _trajectory(traj, text, idl, prl, extra, first, n_tokens, n_ids, (p0, p1), status, (part, parts))
                )
            at, seq = end, number + 1
        for t in found:
            mine = [c for c in chunks if c.traj == t.number]
            t.chunks = sorted(mine, key=lambda c: (c.kind, c.site0, c.tok0))
        return found

    def _payload_crc(self, padded: bytes, kind: int, flags: int, size: int, site0: int, nsites: int) -> int:
        """Of all bytes, or of directory and padding: the directory's own checksums cover the planes."""
        if kind != CHUNK or not flags & FLAG_PLANES:
            return crc32c(padded)
        sites = self.schema.sites[site0 : site0 + nsites]
        directory = 16 * sum(s.planes + (s.global_scale is None) for s in sites) + 8
        return crc32c(padded[:directory] + padded[size:])

    def read_chunk(self, c: Chunk) -> dict[str, tuple[np.ndarray | None, np.ndarray, np.ndarray | None, Any]]:
        """All sites of a chunk: packed codes `[T, planes, ·]`, scales, token scales, checks."""
        try:
            return self._read_chunk(c)
        except _NONSENSE as e:
            raise self._bad(c.off, f"chunk does not parse ({e})") from e

    def _read_chunk(self, c: Chunk) -> dict[str, tuple[np.ndarray | None, np.ndarray, np.ndarray | None, Any]]:
        payload = self.data[c.off + 64 : c.off + 64 + -(-c.size // 8) * 8]
        if self._payload_crc(payload, c.kind, c.flags, c.size, c.site0, c.nsites) != c.crc:
            raise self._bad(c.off, "payload checksum")
        sites = self.schema.sites[c.site0 : c.site0 + c.nsites]
        if c.kind == AUDIT:
            sites = [replace(s, bits=4, encoding="lossless") for s in sites]
        split = self._planes if c.flags & FLAG_PLANES else self._whole
        rows = {}
        for site, token_scale, blocks in split(c, payload[: c.size], sites):
            codes, scales, checks = [], [], []
            for code, scale in blocks:
                at = c.ntok * site.stored_code_row
                codes.append(_codes(site, np.frombuffer(code[:at], np.uint8).reshape(c.ntok, -1)))
                checks.append(np.frombuffer(code[at:], "<u2").reshape(c.ntok, -1))
                packed = np.frombuffer(scale, np.uint8).reshape(c.ntok, site.stored_scale_row)
                low = site.scale_bits < 8
                scales.append(unpack_rows(packed, site.scale_bits, site.scale_row) if low else packed)
            rows[site.name] = (
                np.stack(codes, 1) if site.bits else None,
                np.stack(scales, 1),
                None if token_scale is None else np.frombuffer(token_scale, "<f4"),
                np.stack(checks, 1) if site.n_checks else None,
            )
        return rows

    def _whole(self, c: Chunk, payload: bytes, sites: list[SiteSpec]) -> Any:
        at, fixed = 0, []
        for s in sites:
            token_scale = None
            if s.global_scale is None:
                token_scale, at = payload[at : at + 4 * c.ntok], at + 4 * c.ntok
            size = c.ntok * (s.stored_code_row + 2 * s.n_checks)
            blocks = [payload[at + p * size : at + (p + 1) * size] for p in range(s.planes)]
            fixed.append((s, token_scale, blocks))
            at += s.planes * size
        tail = payload[at:]
        raw = sum(c.ntok * s.planes * s.stored_scale_row for s in sites)
        if c.flags & FLAG_ZTAIL:
            tail = _unzip(tail, raw)
        if len(tail) != raw:
            raise self._bad(c.off, f"scales have {len(tail)} bytes, {raw} expected")
        at = 0
        for s, token_scale, blocks in fixed:
            size = c.ntok * s.stored_scale_row
            yield s, token_scale, [(b, tail[at + p * size : at + (p + 1) * size]) for p, b in enumerate(blocks)]
            at += s.planes * size

    def _planes(self, c: Chunk, payload: bytes, sites: list[SiteSpec]) -> Any:
        entries = sum(s.planes + (s.global_scale is None) for s in sites)
        if crc32c(payload[: 16 * entries]) != struct.unpack_from("<I", payload, 16 * entries)[0]:
            raise self._bad(c.off, "plane directory checksum")
        at, i = 16 * entries + 8, 0

        def block() -> tuple[bytes, int, int]:
            nonlocal at, i
            size, scales, crc, _, how, _ = struct.unpack_from("<IIIBBB", payload, 16 * i)
            data = payload[at : at + size]
            if crc32c(data) != crc:
                raise self._bad(c.off, "plane checksum")
            at, i = at + size, i + 1
            return data, scales, how

        for s in sites:
            token_scale = block()[0] if s.global_scale is None else None
            blocks = []
            for _ in range(s.planes):
                data, length, how = block()
                scale = data[len(data) - length :]
                if how == 2:
                    raw = c.ntok * s.stored_scale_row
                    scale = _unzip(scale, raw)
                blocks.append((data[: len(data) - length], scale))
            yield s, token_scale, blocks


def _unzip(frame: bytes, size: int) -> bytes:
    """The `size` bytes of a zstd frame; what it claims is looked at before memory is given to it."""
    claimed = zstandard.frame_content_size(frame)
    if claimed not in (-1, size):
        raise ValueError(f"a zstd frame claims {claimed} bytes, {size} are expected")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)


def _codes(site: SiteSpec, stored: np.ndarray) -> np.ndarray:
    """Packed rows; the coset leaders of rm15 syndromes have zeros at positions 0, 1, 2, 4, 8 and 16 of 32."""
    if site.encoding != "rm15":
        return stored
    groups = -(-site.width // 32)
    kept = np.unpackbits(stored, axis=-1, count=groups * 26, bitorder="little").reshape(-1, groups, 26)
    bits = np.zeros((len(stored), groups, 32), np.uint8)
    bits[..., [j for j in range(32) if j not in (0, 1, 2, 4, 8, 16)]] = kept
    return pack_rows(bits.reshape(len(stored), -1)[:, : site.code_row * 8], 1)


def _trajectory(number, text, id_len, prefix_len, extra_len, first, n_tokens, n_ids, policy, status, part) -> Any:
    end = id_len + prefix_len
    extra = bytes(text[end : end + extra_len])
    return PureTrajectory(
        number=number,
        traj_id=text[:id_len].decode(),
        prefix=text[id_len:end].decode(),
        first=first,
        n_tokens=n_tokens,
        n_ids=n_ids,
        policy_version=policy,
        status=STATUS[status],
        part=part,
        extra=msgpack.unpackb(extra, strict_map_key=False) if extra else None,
    )
