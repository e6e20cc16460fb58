"""The queue between producers and the threads that write."""

import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset
from tracekit.guidance.writer import QueueFullError

WIDE = GuidanceSchema(sites=[SiteSpec(name="x", width=4096, bits=4)])


def wide_rows(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 16, (n, 4096), dtype=np.uint8), rng.integers(90, 110, (n, 256), dtype=np.uint8)


@pytest.mark.parametrize("threads", [1, 3])
def test_producers_on_many_threads(tmp_path, store, threads):
    schema = store.schema()
    rows = [store.rows(np.random.default_rng(i), schema, 30) for i in range(24)]
    with GuidanceWriter(tmp_path, schema, chunk_tokens=8, threads=threads, queue_bytes=5000, roll_bytes=30_000) as w:

        def produce(k):
            for i in range(k, 24, 4):
                t = w.begin(f"t{i}", token_ids=np.arange(31))
                for s in schema.sites:
                    for a in (0, 10, 20):
                        t.append(s.name, a, *(None if v is None else v[a : a + 10] for v in rows[i][s.name]))
                assert t.commit().result() is True
                assert f"t{i}" in open_dataset(tmp_path)

        producers = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
        [p.start() for p in producers]
        [p.join() for p in producers]
    stats = w.stats()
    assert stats["trajectories"] == 24 and stats["queued"] == 0 and stats["queued_peak"] <= 5000 + 4000
    reader = open_dataset(tmp_path)
    for i in range(24):
        store.check(reader.read_batch([f"t{i}"]), rows[i], slice(None))


@pytest.mark.parametrize("on_full", ["drop", "raise"])
def test_a_full_queue_drops_or_raises_and_counts(tmp_path, on_full):
    codes, scales = wide_rows(64)
    w = GuidanceWriter(tmp_path, WIDE, queue_bytes=1, chunk_tokens=64, on_full=on_full)
    kept, lost = [], []
    for i in range(100):
        w.flush()
        t = w.begin(f"t{i}", token_ids=np.arange(129))
        try:
            t.append("x", 0, codes, scales)
            if i % 2:
                w.flush()
            t.append("x", 64, codes, scales)
            (kept if t.commit().result() else lost).append(i)
        except QueueFullError:
            t.abandon()
            lost.append(i)
    stats = w.close()
    assert set(range(1, 100, 2)) <= set(kept) and len(lost) > 10
    assert stats["dropped"] == len(lost) and stats["trajectories"] == len(kept)
    reader = open_dataset(tmp_path)
    assert reader.ids() == [f"t{i}" for i in kept]
    got = reader.read_batch(reader.ids())["x"]
    np.testing.assert_array_equal(got.codes[:, 0], np.tile(codes, (2 * len(kept), 1)))


def test_blocking_bounds_the_queue(tmp_path):
    codes, scales = wide_rows(64)
    size = 64 * (2048 + 256)
    with GuidanceWriter(tmp_path, WIDE, queue_bytes=3 * size, chunk_tokens=64) as w:
        t = w.begin("t", token_ids=np.arange(64 * 100 + 1))
        for i in range(100):
            t.append("x", 64 * i, codes, scales)
        t.commit()
    assert w.stats()["queued_peak"] <= 3 * size
    assert open_dataset(tmp_path)["t"].n_tokens == 6400


def test_the_gil_is_free_during_large_writes_and_reads(tmp_path):
    n = 20_000
    rng = np.random.default_rng(0)
    codes = np.broadcast_to(rng.integers(0, 16, 4096, dtype=np.uint8), (n, 4096)).copy()
    scales = np.full((n, 256), 100, np.uint8)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    with GuidanceWriter(tmp_path, WIDE) as w:
        w.append_batch(["t"], [np.arange(n + 1)], 0, [n], {"x": (codes, scales, None)})
    open_dataset(tmp_path).read_batch(["t"])
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    gaps = np.diff([start, *[t for t in ticks if t <= start + seconds], start + seconds])
    assert gaps.max() < max(0.25 * seconds, 0.1), (gaps.max(), seconds)


FULL = """
import resource, signal, sys, numpy as np
from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
schema = GuidanceSchema(sites=[SiteSpec(name="x", width=4096, bits=4)])
w = GuidanceWriter({dir!r}, schema, chunk_tokens=64)
codes, scales = np.zeros((64, 4096), np.uint8), np.full((64, 256), 100, np.uint8)
done, errors = 0, []
for i in range(40):
    try:
        t = w.begin(f"t{{i}}", token_ids=np.arange(65))
        t.append("x", 0, codes, scales)
        assert t.commit().result(10)
        done += 1
    except DataError as e:
        errors.append(str(e))
for call in (w.flush, w.close, lambda: w.begin("z", token_ids=[1])):
    try:
        call()
        print("silent", call)
    except DataError as e:
        errors.append(str(e))
assert len(errors) == 40 - done + 3 and all("File too large" in e or "is closed" in e for e in errors), errors
assert len(open_dataset({dir!r})) == done
print("done", done)
"""


def test_a_full_disk_reaches_every_later_call_and_keeps_what_was_committed(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", FULL.format(dir=str(tmp_path))], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert 3 < int(out.stdout.split()[-1]) < 40 and "silent" not in out.stdout


def test_fork_and_pickle(tmp_path, store):
    data = store.dataset(tmp_path / "a", [30, 11])
    reader = open_dataset(tmp_path / "a")
    store.check(reader.read_batch(data.ids), data.rows, slice(None))
    store.check(pickle.loads(pickle.dumps(reader)).read_batch(data.ids), data.rows, slice(None))
    w = GuidanceWriter(tmp_path / "b", data.schema)
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store.check(reader.read_batch(data.ids), data.rows, slice(None))
                try:
                    w.begin("t", token_ids=[1])
                except DataError as e:
                    code = 0 if "after a fork" in str(e) else 2
                del w
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(p, 0)[1] for p in children] == [0] * 8
    w.close()


def test_errors_of_a_batch_leave_the_writer_usable(tmp_path, store):
    schema = store.schema()
    rows = store.rows(np.random.default_rng(0), schema, 4)
    with GuidanceWriter(tmp_path, schema) as w:
        with pytest.raises(ValueError, match="appears twice"):
            w.append_batch(["a", "a"], [np.arange(3)] * 2, 0, [2, 2], rows)
        w.append_batch(["a", "b"], [np.arange(3)] * 2, 0, [2, 2], rows)
    with pytest.raises(DataError, match="is closed"):
        w.begin("c", token_ids=[1])
    assert open_dataset(tmp_path).ids() == ["a", "b"]
