"""Killed writers, flipped bits, torn files."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tracekit.cli import guidance as cli
from tracekit.errors import DataError
from tracekit.guidance import open_dataset, verify

WRITER = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from conftest import make_schema, make_rows
from tracekit.guidance import GuidanceWriter
schema = make_schema()
rng = np.random.default_rng(0)
w = GuidanceWriter({dir!r}, schema, chunk_tokens=8)
for i in range(100000):
    rows = make_rows(np.random.default_rng(i), schema, 20)
    w.append_batch([f"t{{i}}"], [np.arange(21) + i], 0, [20], rows)
    print(i, flush=True)
"""


def test_a_killed_writer_loses_no_committed_trajectory(tmp_path, store):
    code = WRITER.format(dir=str(tmp_path), tests=os.path.dirname(__file__))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    committed = -1
    while committed < 30:
        committed = int(child.stdout.readline())
    time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    for line in child.stdout:
        committed = int(line)
    child.wait()
    assert not list(tmp_path.glob("*.tkg"))
    reader = open_dataset(tmp_path)
    assert len(reader) in (committed + 1, committed + 2)
    for i in range(committed + 1):
        rows = store.rows(np.random.default_rng(i), store.schema(), 20)
        store.check(reader.read_batch([f"t{i}"], token_ids=[np.arange(21) + i]), rows, slice(None))


def args_for(path):
    return type("Args", (), {"dir": str(path), "ids": 3, "max_ids": 100})()


def test_verify_finds_every_flipped_bit_and_no_read_returns_wrong_rows(tmp_path, store, capsys):
    clean = tmp_path / "clean"
    data = store.dataset(clean, [30, 11, 450], chunk_tokens=512, roll_bytes=1)
    assert cli.verify(args_for(clean)) == 0 and cli.inspect(args_for(clean)) == 0
    files = sorted(clean.glob("*.tkg"))
    sizes = [f.stat().st_size for f in files]
    assert len(files) == 3
    rng = np.random.default_rng(3)
    work = tmp_path / "work"
    shutil.copytree(clean, work)
    capsys.readouterr()
    ends = np.cumsum(sizes)
    for at in rng.integers(0, ends[-1], 1000):
        k = int(np.searchsorted(ends, at, side="right"))
        offset, bit = int(at - (ends[k] - sizes[k])), int(rng.integers(8))
        path = work / files[k].name
        with open(path, "r+b") as f:
            f.seek(offset)
            old = f.read(1)
            f.seek(offset)
            f.write(bytes([old[0] ^ 1 << bit]))
        assert cli.verify(args_for(work)) == 4, (path, offset, bit)
        line = capsys.readouterr().out.splitlines()[0]
        start, end = (int(x) for x in line.split("bytes ")[1].split(":")[0].split(".."))
        assert path.name in line and start <= offset < end, (line, offset)
        with open(path, "r+b") as f:
            f.seek(offset)
            f.write(old)
    assert cli.verify(args_for(work)) == 0
    store.check(open_dataset(work).read_batch(data.ids), data.rows, slice(None))


@pytest.mark.filterwarnings("ignore:.*damaged")
def test_a_flipped_bit_never_gives_wrong_rows(tmp_path, store):
    data = store.dataset(tmp_path, [30, 11, 450], chunk_tokens=512)
    (path,) = tmp_path.glob("*.tkg")
    raw = path.read_bytes()
    rng = np.random.default_rng(4)
    starts = np.concatenate([[0], np.cumsum(data.lengths)])
    damaged = 0
    for at in rng.integers(0, len(raw), 300):
        bad = bytearray(raw)
        bad[at] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        for i, t in enumerate(data.ids):
            try:
                got = open_dataset(tmp_path).read_batch([t])
            except DataError:
                damaged += 1
                continue
            store.check(got, data.rows, slice(starts[i], starts[i + 1]))
    assert damaged > 100


def test_damaged_index_falls_back_to_the_records(tmp_path, store):
    data = store.dataset(tmp_path, [30, 11])
    (path,) = tmp_path.glob("*.tkg")
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    with pytest.warns(UserWarning, match="postscript"):
        reader = open_dataset(tmp_path)
    store.check(reader.read_batch(data.ids), data.rows, slice(None))


def test_truncation_at_every_byte_keeps_what_was_committed_before(tmp_path, store):
    data = store.dataset(tmp_path / "a", [3, 2, 2], chunk_tokens=2)
    (path,) = (tmp_path / "a").glob("*.tkg")
    raw = path.read_bytes()
    records = open_records(raw)
    end_of_records = records[-1][1]
    commits = [end for kind, end in records if kind == 2]
    work = tmp_path / "b"
    work.mkdir()
    cut = work / (path.name + ".open")
    for n in range(records[-5][1], end_of_records + 1):
        cut.write_bytes(raw[:n])
        reader = open_dataset(work)
        whole = sum(end <= n for end in commits)
        assert len(reader) == whole
        ids = data.ids[:whole]
        store.check(reader.read_batch(ids), data.rows, slice(0, sum(data.lengths[:whole])))
        report = verify(work)[0]
        at_boundary = n in {end for _, end in records}
        assert bool(report["damage"]) != at_boundary
        assert all(torn for *_, torn in report["damage"])


def open_records(raw):
    """`(kind, end)` of every record."""
    at, out = 4096 + (int.from_bytes(raw[64:68], "little") + 7) // 8 * 8, []
    while raw[at : at + 4] == b"TKR1":
        size = int.from_bytes(raw[at + 8 : at + 16], "little")
        out.append((raw[at + 4], at + 64 + (size + 7) // 8 * 8))
        at = out[-1][1]
    return out
