"""Runs under LD_PRELOAD=faults.so: one forked writer for each fault; prints what each of them was told, as JSON."""

import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np
from conftest import make_rows, make_wide_schema

from tracekit.errors import DataError
from tracekit.guidance import GuidanceWriter

SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
SHIM.tk_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
SHIM.tk_left.restype = ctypes.c_long
CALLS = {"write": 0, "sync": 1, "rename": 2, "close": 3}
MODES = {"enospc": 1, "eio": 2, "short": 3, "kill_before": 4, "kill_half": 5, "kill_after": 6}


def writer(folder, say, io):
    """Six trajectories by the queue and one batch; `say` is told what is committed and what fails."""
    schema = make_wide_schema()
    calls = []
    w = GuidanceWriter(folder, schema, chunk_tokens=8, sync="commit", io=io)

    def stream(i):
        rows = make_rows(np.random.default_rng(i), schema, 20)
        t = w.begin(f"t{i}", token_ids=np.arange(21))
        for s in schema.sites:
            t.append(s.name, 0, *rows[s.name])
        if t.commit().result(20):
            say("committed", i)

    def batch():
        rows = make_rows(np.random.default_rng(9), schema, 20)
        w.append_batch(["t9"], [np.arange(21)], 0, [20], rows)
        say("committed", 9)

    calls = [lambda i=i: stream(i) for i in range(3)] + [batch, lambda: stream(4), w.flush, w.close]
    for call in calls:
        try:
            call()
        except DataError as e:
            say("error", str(e))
    say("end", SHIM.tk_left())


def run(folder, call, n, mode, io):
    """What a forked writer said, until it ended or was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        SHIM.tk_arm(CALLS[call], n, MODES[mode])
        try:
            writer(folder, lambda *line: os.write(write, (json.dumps(line) + "\n").encode()), io)
        except BaseException as e:
            os.write(write, (json.dumps(["crash", repr(e)]) + "\n").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        said = [json.loads(line) for line in f]
    os.waitpid(pid, 0)
    return said


def main(root, io):
    calls = {
        "write": ["enospc", "eio", "short", "kill_before", "kill_half", "kill_after"],
        "sync": ["eio", "kill_before", "kill_after"],
        "rename": ["eio", "kill_before", "kill_after"],
        "close": ["eio", "enospc", "kill_before"],
    }
    if io == "direct":
        calls = {"write": ["eio", "kill_half", "kill_after"]}
    for call, modes in calls.items():
        for mode in modes:
            for n in range(100):
                folder = Path(root) / f"{call}-{mode}-{n}"
                said = run(folder, call, n, mode, io)
                reached = not (said and said[-1][0] == "end" and said[-1][1] >= 0)
                print(json.dumps([call, mode, n, str(folder), said, reached]), flush=True)
                if not reached:
                    break


main(*sys.argv[1:])
