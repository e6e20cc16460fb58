"""What a long stream and a rank's slice cost: resident memory of a writer, bytes that a reader reads."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
QUEUE = 64 << 20

STREAM = """
import json, os, sys, threading, time
from pathlib import Path
import numpy as np
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec

folder, total, queue = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
width, tokens, sites = 4096, 1024, 8
rng = np.random.default_rng(0)
codes = rng.integers(0, 256, (tokens, width // 8), dtype=np.uint8)
scales = rng.integers(90, 110, (tokens, width // 16), dtype=np.uint8)
schema = GuidanceSchema(sites=[SiteSpec(name=f"s{i}", width=width, encoding="compact") for i in range(sites)])
peak, done = 0, threading.Event()

def sink():  # what is sealed is gone, and the memory is watched
    global peak
    while not done.wait(0.02):
        for p in folder.glob("*.tkg"):
            p.unlink()
        peak = max(peak, resident())

thread = threading.Thread(target=sink)
with GuidanceWriter(folder, schema, queue_bytes=queue, roll_bytes=256 << 20) as w:
    before = resident()
    thread.start()
    sent, i, start = 0, 0, time.perf_counter()
    while sent < total:
        t = w.begin(f"t{i}", token_ids=np.arange(tokens + 1))
        for s in schema.sites:
            t.append(s.name, 0, codes, scales, packed=True)
        t.commit()
        sent += sites * (codes.nbytes + scales.nbytes)
        i += 1
stats = w.close()
seconds = time.perf_counter() - start
done.set()
thread.join()
print(json.dumps({"sent": sent, "seconds": seconds, "grew": peak - before, **stats}))
"""


def stream(total):
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        command = [sys.executable, "-c", STREAM, folder, str(total), str(QUEUE)]
        out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout)
    print(told)
    assert told["sent"] >= total and told["queued_peak"] <= QUEUE
    assert told["grew"] < QUEUE + (200 << 20), told
    return told


def test_a_stream_keeps_the_writer_small():
    assert stream(1 << 30)["segments"] > 2


@pytest.mark.long
def test_a_stream_of_50_gb_keeps_the_writer_small():
    told = stream(50_000_000_000)
    assert told["stalls"] > 0 and told["queued_peak"] > QUEUE // 2, "the queue was full: the producer had to wait"


def slice_cost(folder, trajectories):
    """(bytes that a rank's slice holds on disk, bytes read for it) of a dataset of MoE inputs, keys and values."""
    tokens, heads = 1024, 8
    sites = [SiteSpec(name=f"layers.{i}.moe_input", width=2048, encoding="compact") for i in range(8)]
    for i in range(8):
        sites += [SiteSpec(name=f"layers.{i}.{n}", width=128, planes=heads, encoding="compact") for n in "kv"]
    schema = GuidanceSchema(sites=sites)
    rng = np.random.default_rng(0)
    with GuidanceWriter(folder, schema) as w:
        for t in range(trajectories):
            rows = {}
            for s in sites:
                codes = rng.integers(0, 256, (tokens, s.planes, s.code_row), dtype=np.uint8)
                scales = rng.integers(90, 110, (tokens, s.planes, s.scale_row), dtype=np.uint8)
                rows[s.name] = (codes, scales, None)
            w.append_batch([f"t{t}"], [np.arange(tokens + 1)], 0, [tokens], rows, packed=True)
    total = sum(p.stat().st_size for p in Path(folder).iterdir())
    reader = open_dataset(folder)
    # One of two pipeline stages, one of four tensor-parallel ranks, a context-parallel half, every other trajectory.
    mine = [s for s in sites if int(s.name.split(".")[1]) < 4]
    ids = [f"t{t}" for t in range(0, trajectories, 2)]
    stored = 0
    for s in mine:
        row = s.stored_code_row + 2 * s.n_checks + s.stored_scale_row
        stored += min(s.planes, 2) * row * tokens // 2 * len(ids)

    def read():
        return int(next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar")).split()[1])

    read()
    names = [s.name for s in mine]
    before = read()
    for t in ids:
        reader.read_batch([t], 512, 1024, names, heads=slice(2, 4), unpack=False)
    return stored, read() - before, total


def test_a_slice_reads_little_more_than_its_bytes(tmp_path):
    stored, read, total = slice_cost(tmp_path, 4)
    assert stored <= read <= 1.1 * stored and total > 8 * stored, (stored, read, total)


@pytest.mark.long
def test_a_slice_of_a_large_dataset_reads_little_more_than_its_bytes():
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        stored, read, total = slice_cost(folder, 200)
    print({"slice": stored, "read": read, "dataset": total})
    assert stored <= read <= 1.1 * stored and total > 1_000_000_000, (stored, read, total)
