"""Training under `guidance.byte_budget`: early checkpoints, nothing deleted before its time, resume after a kill."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tracekit.cli import main

TINY = [
    "--model.n-layers", "2", "--warmstart.steps", "2", "--warmstart.batch-size", "16", "--steps", "6",
    "--task.eval-size", "4", "--task.train-size", "500", "--rollout.prompts-per-step", "4", "--rollout.group-size", "4",
    "--checkpoint.interval", "100", "--guidance.keep-steps", "-1", "--algo.x-baseline-prompts", "2",
    "--algo.correction", "acrl",
]  # fmt: skip


def arguments(out, *flags):
    return ["train", "--out", str(out), "--name", "r", *TINY, *flags]


def lines(out):
    read = [json.loads(line) for line in (out / "r" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in read if "event" not in line}


def size(folder):
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def checkpoints(out):
    return sorted(int(f.name[5:]) for f in (out / "r" / "checkpoints").glob("step_*") if (f / "COMPLETE").exists())


def folders(out):
    return sorted(int(f.name[5:]) for f in (out / "r" / "guidance").glob("step_*"))


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """The run without a budget, and the size of its largest step."""
    out = tmp_path_factory.mktemp("free")
    assert main(arguments(out)) == 0
    assert folders(out) == [0, 1, 2, 3, 4, 5, 6] and checkpoints(out) == [6]
    assert "guidance/disk_bytes" not in lines(out)[1]
    return lines(out), max(size(out / "r" / "guidance" / f"step_{n:06d}") for n in range(1, 7))


def same(got, want):
    for step in got:
        for key, value in want[step].items():
            if not key.startswith("time"):
                assert got[step][key] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, key)


def test_a_budget_that_binds_brings_checkpoints_early_and_changes_no_number(free, tmp_path):
    want, largest = free
    budget = 3 * largest
    flags = ("--guidance.byte-budget", str(budget), "--checkpoint.keep", "9")
    assert main(arguments(tmp_path, *flags)) == 0
    got = lines(tmp_path)
    same(got, want)
    early = [step for step, line in got.items() if line["guidance/early_checkpoint"]]
    assert early and all(step in checkpoints(tmp_path) for step in early)
    assert checkpoints(tmp_path) == sorted({*early, 6}) and len(early) < 6
    for line in got.values():
        assert line["guidance/disk_bytes"] <= budget
        assert line["guidance/budget_frac"] == pytest.approx(line["guidance/disk_bytes"] / budget)
    assert 6 in folders(tmp_path) and 1 not in folders(tmp_path)
    assert size(tmp_path / "r" / "guidance") <= budget


KILLED = """
import os, signal, sys
from tracekit.cli import main
from tracekit.learner.update import Update
real = Update.mini_step
def mini_step(self, *rest):
    if self.learner.version == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *rest)
Update.mini_step = mini_step
main(sys.argv[1:])
"""


def test_a_killed_run_resumes_without_the_steps_that_were_deleted(free, tmp_path):
    want, largest = free
    flags = ("--guidance.byte-budget", str(3 * largest))
    command = [sys.executable, "-c", KILLED, *arguments(tmp_path, *flags)]
    threads = str(torch.get_num_threads())  # sums in the order of the run that it is compared with
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": threads}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    last = checkpoints(tmp_path)[-1]
    assert 0 < last < 5 and 5 in folders(tmp_path), "step 5 was sampled and not learnt from"
    assert not {0, 1} & set(folders(tmp_path)), "old steps had to go"
    assert set(folders(tmp_path)) >= set(range(last + 1, 6)), "what no checkpoint holds is all there"
    assert main(arguments(tmp_path, *flags, "--resume")) == 0
    got = lines(tmp_path)
    assert sorted(got) == [1, 2, 3, 4, 5, 6]
    same({step: line for step, line in got.items() if step > last}, want)
    assert max(line["guidance/budget_frac"] for line in got.values()) <= 1


def test_a_step_that_never_fits_ends_the_run_after_a_checkpoint(free, tmp_path, capfd):
    want, largest = free
    assert main(arguments(tmp_path, "--guidance.byte-budget", str(largest // 2))) == 4
    error = capfd.readouterr().err
    assert "never fit the budget" in error and "guidance.byte_budget" in error
    assert checkpoints(tmp_path) == [1]
    assert main(arguments(tmp_path, "--guidance.byte-budget", str(3 * largest), "--resume")) == 0
    same({step: line for step, line in lines(tmp_path).items() if step > 1}, want)
