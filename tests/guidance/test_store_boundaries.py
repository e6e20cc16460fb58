"""Offsets beyond 2^31 and 2^32: sparse files, whose records are moved apart by hole records of zeros."""

import struct

import pytest

from tracekit._core import crc32c
from tracekit.guidance import open_dataset, recover, verify

HOLE = 64 << 20  # the largest payload
ZEROS = crc32c(bytes(HOLE))


def stretch(raw, path, holes):
    """Writes the segment `raw` with `holes` hole records behind its first commit; returns where its records end."""
    uuid = raw[32:40]
    first = 4096 + -(-struct.unpack_from("<I", raw, 64)[0] // 8) * 8
    index, n_chunks = struct.unpack_from("<Q", raw, len(raw) - 56)[0], struct.unpack_from("<I", raw, len(raw) - 24)[0]
    gap, at, moved = holes * (64 + HOLE), first, bytearray()
    split = seq0 = None
    while at < index:
        size, seq = struct.unpack_from("<QQ", raw, at + 8)
        end = at + 64 + -(-size // 8) * 8
        if split is not None:
            record = bytearray(raw[at:end])
            struct.pack_into("<Q", record, 16, seq + holes)
            struct.pack_into("<I", record, 60, crc32c(bytes(record[:60])))
            moved += record
        elif raw[at + 4] == 2:
            split, seq0 = end, seq + 1
        at = end
    table = bytearray(raw[index:-64])
    for i in range(n_chunks):
        (off,) = struct.unpack_from("<Q", table, 48 * i + 16)
        if off >= split:
            (seq,) = struct.unpack_from("<Q", table, 48 * i + 40)
            struct.pack_into("<Q", table, 48 * i + 16, off + gap)
            struct.pack_into("<Q", table, 48 * i + 40, seq + holes)
    post = bytearray(raw[-64:])
    struct.pack_into("<QQQ", post, 8, index + gap, len(table), len(raw) + gap)
    struct.pack_into("<II", post, 48, crc32c(bytes(table)), 0)
    struct.pack_into("<I", post, 52, crc32c(bytes(post)))
    with open(path, "wb") as f:
        f.write(raw[:split])
        for i in range(holes):
            head = bytearray(64)
            struct.pack_into("<4sBxxxQQ8sI", head, 0, b"TKR1", 0, HOLE, seq0 + i, uuid, ZEROS)
            struct.pack_into("<I", head, 60, crc32c(bytes(head[:60])))
            f.seek(split + i * (64 + HOLE))
            f.write(head)
        f.seek(split + gap)
        f.write(moved + table + post)
    return index + gap


@pytest.mark.parametrize("boundary", [pytest.param(1 << 31, marks=pytest.mark.long), 1 << 32])
def test_records_beyond_the_boundary_are_read(tmp_path, store, boundary):
    data = store.dataset(tmp_path / "whole", [20, 30], chunk_tokens=8)
    (path,) = (tmp_path / "whole").glob("*.tkg")
    (tmp_path / "far").mkdir()
    far = tmp_path / "far" / path.name
    end = stretch(path.read_bytes(), far, boundary // HOLE)
    assert far.stat().st_size > boundary > 100 * far.stat().st_blocks * 512

    def check():
        for mmap in (False, True):
            reader = open_dataset(tmp_path / "far", mmap=mmap)
            store.check(reader.read_batch(data.ids, token_ids=data.tokens), data.rows, slice(None))

    check()
    (report,) = verify(tmp_path / "far")
    assert report["damage"] == [] and report["trajectories"] == 2
    with open(far, "rb+") as f:
        f.truncate(end + 100)
    far.rename(far.with_name(far.name + ".open"))
    (report,) = recover(tmp_path / "far")
    assert (report["trajectories"], report["torn_bytes"], report["interior"]) == (2, 100, [])
    check()
