"""Files made to hurt: every structure with lengths, counts and offsets that lie, and with checksums that are right.

Each is opened, read, verified and recovered in a forked child whose address space may grow by 192 MiB only. It must
end with a DataError or with the right rows: no crash, no hang, no huge allocation, no wrong row.
"""

import os
import resource
import struct
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "guidance"))
from conftest import assert_rows, make_dataset, make_rows  # noqa: E402

from tracekit._core import crc32c  # noqa: E402
from tracekit.errors import DataError  # noqa: E402
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset, recover, verify  # noqa: E402

EXTREMES = [0, 1, 2**31, 2**32 - 1]
LONG = [*EXTREMES, 2**63, 2**64 - 1, 2**64 - 64]
FEW = [1, 2**64 - 64]  # the default run; `-m long` takes all


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "all"], autouse=True)
def every_extreme(request):
    global ALL
    ALL = request.param


class Segment:
    """A segment taken apart, so that parts can be changed and its checksums made right again."""

    def __init__(self, raw):
        self.raw = bytearray(raw)
        self.first = 4096 + -(-struct.unpack_from("<I", raw, 64)[0] // 8) * 8
        self.index, self.index_len = struct.unpack_from("<QQ", raw, len(raw) - 56)
        self.n_chunks, self.n_trajs = struct.unpack_from("<II", raw, len(raw) - 24)

    def records(self):
        at = self.first
        while at < self.index:
            size = struct.unpack_from("<Q", self.raw, at + 8)[0]
            yield at, self.raw[at + 4], size
            at += 64 + -(-size // 8) * 8

    def seal(self, records=True):
        """Recomputes every checksum."""
        raw = self.raw
        struct.pack_into("<I", raw, 68, crc32c(raw[4096 : self.first]))
        struct.pack_into("<I", raw, 4092, crc32c(raw[:4092]))
        if records:
            for at, _, size in list(self.records()):
                struct.pack_into("<I", raw, at + 32, crc32c(raw[at + 64 : at + 64 + -(-size // 8) * 8]))
                struct.pack_into("<I", raw, at + 60, crc32c(raw[at : at + 60]))
        self.post()
        return bytes(raw)

    def post(self, fresh_index=True):
        raw = self.raw
        end = len(raw) - 64
        if fresh_index:
            struct.pack_into("<I", raw, end + 48, crc32c(raw[self.index : end]))
        struct.pack_into("<I", raw, end + 52, 0)
        struct.pack_into("<I", raw, end + 52, crc32c(raw[end:]))
        return bytes(raw)


def attempt(folder, data):
    """In a child: 0 if everything ended in DataError or right rows."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 9
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (192 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        import warnings

        warnings.simplefilter("ignore")
        code = 0
        starts = np.concatenate([[0], np.cumsum(data.lengths)])
        for work in (lambda: verify(folder), lambda: recover(folder), None):
            try:
                if work:
                    work()
                    continue
                reader = open_dataset(folder)
                reader.ids()
            except DataError:
                continue
            for i, t in enumerate(data.ids):
                try:
                    reader[t]
                    got = reader.read_batch([t], [0], [data.lengths[i]])
                    assert_rows(got, data.rows, slice(starts[i], starts[i + 1]))
                except DataError:
                    pass
    except BaseException as e:
        print(repr(e), file=sys.stderr, flush=True)
        code = code or 8
        code = 8
    finally:
        os._exit(code)


@pytest.fixture(name="base")
def base_dataset(tmp_path):
    data = make_dataset(tmp_path / "base", [30, 600, 4], chunk_tokens=420)
    (path,) = (tmp_path / "base").glob("*.tkg")
    folder = tmp_path / "work"
    folder.mkdir()
    return data, path.read_bytes(), folder / path.name


def check(base, raw, what, unsealed=True):
    data, _, path = base
    for p in path.parent.iterdir():
        p.unlink()
    path.write_bytes(raw)
    assert attempt(path.parent, data) == 0, what
    if not unsealed:
        return
    path.rename(path.parent / (path.name + ".open"))
    assert attempt(path.parent, data) == 0, (what, "as an open file")


def fields(base, where, layout):
    """Every field of a structure at `where(segment)` takes every extreme value."""
    for offset, code in layout:
        for value in (LONG if code == "Q" else EXTREMES) if ALL else FEW:
            s = Segment(base[1])
            size = struct.calcsize(code)
            mask = (1 << 8 * size) - 1
            for at in where(s):
                struct.pack_into("<" + code, s.raw, at + offset, value & mask)
            yield s, (offset, code, value)


def test_header_fields(base):
    for s, what in fields(
        base, lambda s: [0], [(8, "H"), (10, "H"), (12, "I"), (16, "Q"), (24, "Q"), (56, "Q"), (64, "I")]
    ):
        raw = s.raw
        struct.pack_into("<I", raw, 4092, crc32c(raw[:4092]))
        check(base, bytes(raw), what)


def test_record_fields(base):
    layout = [(4, "B"), (5, "B"), (8, "Q"), (16, "Q"), (36, "I"), (40, "I"), (44, "I"), (48, "H"), (50, "H")]
    for s, what in fields(base, lambda s: [next(s.records())[0]], layout):
        at = s.first
        struct.pack_into("<I", s.raw, at + 60, crc32c(s.raw[at : at + 60]))
        check(base, s.post(), ("record", *what))


def test_commit_fields(base):
    layout = [(0, "I"), (4, "I"), (8, "I"), (12, "I"), (32, "B"), (33, "B"), (34, "B"), (36, "H"), (38, "H"), (40, "I")]
    where = lambda s: [at + 64 for at, kind, _ in s.records() if kind == 2]  # noqa: E731
    for s, what in fields(base, where, layout):
        check(base, s.seal(), ("commit", *what))


def test_index_fields(base):
    chunk = [(0, "I"), (4, "H"), (6, "H"), (8, "I"), (12, "I"), (16, "Q"), (24, "I"), (28, "B"), (29, "B")]
    for s, what in fields(base, lambda s: [s.index, s.index + 48], chunk):
        check(base, s.post(), ("chunk entry", *what), unsealed=False)
    traj = [
        (4, "I"),
        (8, "I"),
        (12, "I"),
        (16, "I"),
        (20, "I"),
        (40, "Q"),
        (48, "I"),
        (52, "B"),
        (53, "B"),
        (54, "B"),
        (58, "H"),
    ]
    for s, what in fields(base, lambda s: [s.index + 48 * s.n_chunks + 64 * i for i in range(s.n_trajs)], traj):
        check(base, s.post(), ("trajectory entry", *what), unsealed=False)
    order = lambda s: [s.index + 48 * s.n_chunks + 64 * s.n_trajs + 4 * i for i in range(s.n_trajs)]  # noqa: E731
    for s, what in fields(base, order, [(0, "I")]):
        check(base, s.post(), ("order", *what), unsealed=False)


def test_postscript_fields(base):
    layout = [(8, "Q"), (16, "Q"), (24, "Q"), (40, "I"), (44, "I")]
    for s, what in fields(base, lambda s: [len(s.raw) - 64], layout):
        check(base, s.post(fresh_index=False), ("postscript", *what), unsealed=False)


def test_plane_directory_fields(base):
    for entry in (0, 5):
        for offset, code in ((0, "I"), (4, "I"), (12, "B"), (13, "B"), (14, "B")):
            for value in EXTREMES if ALL else FEW:
                s = Segment(base[1])
                at = next(at for at, kind, _ in s.records() if kind == 1 and s.raw[at + 5] & 1) + 64
                entries = 1 + 3 + 1 + 2 + 1 + 1 + 2
                struct.pack_into(
                    "<" + code, s.raw, at + 16 * entry + offset, value & ((1 << 8 * struct.calcsize(code)) - 1)
                )
                struct.pack_into("<I", s.raw, at + 16 * entries, crc32c(s.raw[at : at + 16 * entries]))
                raw = s.seal()
                for i in range(s.n_chunks):  # the index repeats the payload's checksum
                    off = struct.unpack_from("<Q", raw, s.index + 48 * i + 16)[0]
                    s.raw[s.index + 48 * i + 32 : s.index + 48 * i + 36] = s.raw[off + 32 : off + 36]
                check(base, s.post(), ("directory", entry, offset, value))


def test_zstd_frames_that_lie(tmp_path):
    """Frames that claim a terabyte, end early, hold more or less than they should, or are noise."""
    import zstandard

    site = SiteSpec(name="x", width=1024, bits=0)
    schema = GuidanceSchema(sites=[site])
    data = make_dataset(tmp_path / "base", [4], schema=schema)
    data.rows["x"] = (None, np.full((4, 1, 64), 100, np.uint8), None)
    with GuidanceWriter(tmp_path / "zip", schema) as w:
        w.append_batch(["t0"], data.tokens, 0, [4], data.rows)
    (path,) = (tmp_path / "zip").glob("*.tkg")
    raw = path.read_bytes()
    folder = tmp_path / "work"
    folder.mkdir()
    s = Segment(raw)
    at, _, size = next(s.records())
    assert s.raw[at + 5] == 2
    frames = [b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", n) + b"\x03\0\0" for n in (1 << 40, 2**64 - 1, 0, 255, 257)]
    frames += [zstandard.compress(bytes(n)) for n in (0, 255, 257, 1 << 20)]
    frames += [b"", b"\x28\xb5\x2f\xfd", os.urandom(size), bytes(s.raw[at + 64 : at + 64 + size - 1])]
    for i, frame in enumerate(frames):
        s = Segment(raw)
        body = frame + bytes(-len(frame) % 8)
        grown = len(body) - -(-size // 8) * 8
        s.raw[at + 64 : at + 64 + -(-size // 8) * 8] = body
        struct.pack_into("<Q", s.raw, at + 8, len(frame))
        s.index += grown
        struct.pack_into("<Q", s.raw, len(s.raw) - 56, s.index)
        struct.pack_into("<Q", s.raw, len(s.raw) - 40, len(s.raw))
        struct.pack_into("<I", s.raw, s.index + 24, len(frame))
        s.seal()
        s.raw[s.index + 32 : s.index + 36] = s.raw[at + 32 : at + 36]
        (folder / path.name).write_bytes(s.post())
        assert attempt(folder, data) == 0, i


def test_schemas_that_lie(base):
    nested = 0
    for _ in range(200):
        nested = [nested]
    good = msgpack.unpackb(base[1][4096 : 4096 + struct.unpack_from("<I", base[1], 64)[0]])
    site = good["sites"][0]
    variants = [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc1",
        msgpack.packb(nested),
    ]
    for key, values in {
        "planes": [0, 4097, 2**32 - 1, -1, "x"],
        "width": [0, 2**20 + 1, 2**32, 2**64 - 1],
        "block": [0, 2**32 - 1],
        "bits": [5, 255, 256],
        "encoding": ["zip", "rm15", 3],
        "global_scale": [-1, 2**32, "x"],
        "name": ["", "n" * 300, 5],
    }.items():
        for value in values:
            variants.append(msgpack.packb({**good, "sites": [{**site, key: value}, *good["sites"][1:]]}))
    for key, values in {
        "chunk_tokens": [0, 2**32 - 1],
        "sites": [[], [site] * 2, 7, [site] * 5000],
        "user": [nested],
    }.items():
        variants += [msgpack.packb({**good, key: value}) for value in values]
    for i, schema in enumerate(variants):
        s = Segment(base[1])
        records = s.raw[s.first :]
        padded = schema + bytes(-len(schema) % 8)
        raw = bytearray(s.raw[:4096] + padded + records)
        struct.pack_into("<II", raw, 64, len(schema), crc32c(padded))
        struct.pack_into("<I", raw, 4092, crc32c(raw[:4092]))
        check(base, bytes(raw), ("schema", i))


def test_prefixes_that_run_in_circles(tmp_path):
    data = make_dataset(tmp_path, [3])
    rows = make_rows(np.random.default_rng(0), data.schema, 6)
    with GuidanceWriter(tmp_path, data.schema) as w:
        w.append_batch(["a", "b"], [np.arange(6)] * 2, [3, 3], [3, 3], rows, 0, [("b", 3), ("a", 3)])
        w.append_batch(
            ["c"],
            [np.arange(6)],
            [3],
            [3],
            {k: tuple(None if v is None else v[:3] for v in r) for k, r in rows.items()},
            0,
            [("t0", 3)],
        )
    reader = open_dataset(tmp_path)
    with pytest.raises(DataError, match="does not end"):
        reader.read_batch(["a"])
    assert len(reader.read_batch(["c"])["layers.0.v"].scales) == 6


def test_offsets_beyond_two_and_four_gibibytes(tmp_path):
    data = make_dataset(tmp_path / "base", [30, 600, 4], chunk_tokens=420)
    (path,) = (tmp_path / "base").glob("*.tkg")
    s = Segment(path.read_bytes())
    for shift in (2**31 - s.first + 1 & ~7, 2**32 - s.first - 4096 & ~7, 2**32 + 8, 5 << 30):
        folder = tmp_path / str(shift)
        folder.mkdir()
        index = bytearray(s.raw[s.index : -64])
        for i in range(s.n_chunks):
            off = struct.unpack_from("<Q", index, 48 * i + 16)[0]
            struct.pack_into("<Q", index, 48 * i + 16, off + shift)
        post = bytearray(s.raw[-64:])
        struct.pack_into("<QQQ", post, 8, s.index + shift, len(index), len(s.raw) + shift)
        struct.pack_into("<II", post, 48, crc32c(index), 0)
        struct.pack_into("<I", post, 52, crc32c(post))
        with open(folder / path.name, "wb") as f:
            f.write(s.raw[: s.first])
            f.seek(s.first + shift)
            f.write(s.raw[s.first : s.index] + index + post)
        assert_rows(open_dataset(folder).read_batch(data.ids, token_ids=data.tokens), data.rows, slice(None))


def test_a_file_that_shrinks_under_a_reader(tmp_path):
    data = make_dataset(tmp_path, [30, 600, 4], chunk_tokens=420)
    reader = open_dataset(tmp_path)
    (path,) = tmp_path.glob("*.tkg")
    os.truncate(path, 10_000)
    with pytest.raises(DataError, match="ends inside this chunk"):
        reader.read_batch(data.ids)
