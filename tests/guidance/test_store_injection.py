"""Every write, fsync, close and rename of a writer fails, is cut short or is the last thing its process does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tracekit.guidance import open_dataset, recover
from tracekit.guidance.pure import PureReader

HERE = Path(__file__).parent


pytestmark = pytest.mark.skipif(
    not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD"
)

HANGING = """
import ctypes, os, signal, sys, time
import numpy as np
from conftest import make_rows, make_wide_schema
from tracekit.guidance import GuidanceWriter

shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
shim.tk_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
schema = make_wide_schema()
w = GuidanceWriter(sys.argv[1], schema, chunk_tokens=8)
rows = make_rows(np.random.default_rng(0), schema, 20)
t = w.begin("t", token_ids=np.arange(21))
shim.tk_arm(0, 0, 7)
for s in schema.sites:
    t.append(s.name, 0, *rows[s.name])
commit = t.commit()
for wait in (commit.result, w.flush):
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        wait()
    except KeyboardInterrupt:
        print(time.monotonic() - start, flush=True)
try:
    commit.result(0.3)
except TimeoutError:
    print("not yet", flush=True)
os._exit(0)
"""


def environment(folder):
    """Variables under which a Python process meets faults, and finds the tests' helpers."""
    shim = folder / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "faults.c", "-ldl"], check=True)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_an_interrupt_ends_the_wait_for_a_disk_that_hangs(tmp_path):
    """The wait, not the write: a second one still waits for the same commit."""
    command = [sys.executable, "-c", HANGING, tmp_path / "data"]
    out = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    *waited, last = out.stdout.split("\n")[:-1]
    assert len(waited) == 2 and last == "not yet", out.stdout


@pytest.mark.parametrize("io, kinds", [("buffered", 15), ("direct", 3)])
def test_every_fault_at_every_call(tmp_path, store, io, kinds):
    env = environment(tmp_path)
    command = [sys.executable, HERE / "faults_driver.py", tmp_path, io]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    cases = [json.loads(line) for line in out.stdout.splitlines()]
    reached = [c for c in cases if c[-1]]
    assert len({(c, m) for c, m, *_ in reached}) == kinds and len(reached) > 4 * kinds
    want = {i: store.rows(np.random.default_rng(i), store.wide_schema(), 20) for i in (0, 1, 2, 4, 9)}
    for call, mode, n, folder, said, _ in reached:
        where = (call, mode, n)
        committed = [line[1] for line in said if line[0] == "committed"]
        errors = [line[1] for line in said if line[0] == "error"]
        assert not [line for line in said if line[0] == "crash"], (where, said)
        if mode in ("enospc", "eio"):
            assert errors and said[-1][0] == "end", (where, said)
            assert ("make room there" if mode == "enospc" else "Input/output") in errors[0], (where, errors)
        elif mode == "short":
            assert not errors and len(committed) == 5, (where, said)
        elif mode.startswith("kill"):
            assert said == [] or said[-1][0] != "end", (where, said)
        if not list(Path(folder).glob("*.tkg*")):
            assert not committed, where
            continue
        if not committed and all(p.stat().st_size < 5000 for p in Path(folder).iterdir()):
            continue  # it ended inside the header
        for _ in range(2):
            reader = open_dataset(folder)
            ids = reader.ids()
            assert {f"t{i}" for i in committed} <= set(ids), (where, committed, ids)
            for t in ids:
                store.check(reader.read_batch([t], token_ids=[np.arange(21)]), want[int(t[1:])], slice(None))
            assert all(not r["interior"] for r in recover(folder)), where
        assert PureReader(folder).ids() == ids
