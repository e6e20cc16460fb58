"""The writer's thread in a process that ends: what it was given is on disk, and sealed."""

import multiprocessing
import os
import shutil
import signal
import sys
import time

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import SiteSpec, open_dataset, verify
from tracekit.rollout.sglang.capture import Column
from tracekit.rollout.sglang.handover import Finished, Handover, seal_at_end
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.store import SlotStore

SITE = SiteSpec(
    name="layers.0.moe_input", planes=1, width=32, profile="nvfp4-exact", block=16, bits=1, global_scale=1.0
)
COLUMNS = {
    f"{SITE.name}/codes": Column((SITE.code_row,), np.dtype(np.uint8)),
    f"{SITE.name}/scales": Column((SITE.scale_row,), np.dtype(np.uint8)),
}


def finished(name, count=5):
    rows = np.random.default_rng(0).integers(0, 256, (count, SITE.code_row + SITE.scale_row), np.uint8)
    store = SlotStore(count, rows.shape[1])
    store.put(np.arange(count), rows, 0)
    return Finished(step="step_1", trajectory=name, tokens=np.arange(count + 1), rows=store.find(np.arange(count)))


def scheduler(folder, ending):
    """What a scheduler's process does: start, hand over, end."""
    handover = Handover(Settings(folder=str(folder), sites=[SITE]), COLUMNS)
    seal_at_end(handover)
    for i in range(20):
        handover.put(finished(f"r{i}"))
    if ending == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if ending == "exit":
        sys.exit(3)
    if ending == "error":
        raise RuntimeError("a failing scheduler")


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("exit", 3), ("error", 1), ("SIGTERM", -signal.SIGTERM)])
def test_the_last_dataset_is_sealed(tmp_path, ending, code):
    process = multiprocessing.get_context("spawn").Process(target=scheduler, args=(tmp_path, ending))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert sorted(open_dataset(tmp_path / "step_1").ids()) == sorted(f"r{i}" for i in range(20))
    reports = verify(tmp_path / "step_1")
    assert reports and all(r["sealed"] and not r["damage"] for r in reports)


def test_closing_twice_is_closing(tmp_path):
    handover = Handover(Settings(folder=str(tmp_path), sites=[SITE]), COLUMNS)
    handover.put(finished("r0"))
    handover.close()
    handover.close()
    assert verify(tmp_path / "step_1")[0]["sealed"]


def test_a_step_that_was_removed_is_written_anew(tmp_path):
    handover = Handover(Settings(folder=str(tmp_path), sites=[SITE]), COLUMNS)
    handover.put(finished("r0"))
    wait_until(lambda: ids(tmp_path) == ["r0"])
    shutil.rmtree(tmp_path / "step_1")
    handover.put(finished("r1"))
    handover.close()
    handover.check()
    assert ids(tmp_path) == ["r1"]


def ids(folder):
    try:
        return sorted(open_dataset(folder / "step_1").ids())
    except (DataError, FileNotFoundError):
        return []


def wait_until(what, seconds=20):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)
