"""What the quickstart promises: it learns, guidance closes the gap, it fits a laptop.

The long tests train it on three seeds. A finished run named by TRACEKIT_QUICKSTART is checked without training it
again, which is what continuous integration does with the run that `make quickstart` left.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GAIN = 0.15
"""Accuracy that a run must add, as a fraction of the held-out problems."""
SHARE = 1 / 3
"""Mismatch with guidance over mismatch of plain QAT, at most."""
MEMORY_MIB = 4096
STEPS = 30
"""Steps over which the variants' mismatch is compared in the long test."""

SAME_RATE = ("--optim.decay-ratio", "0")
"""The quickstart's learning rate is constant from step 2 to 32; a short variant keeps it so."""

given = os.environ.get("TRACEKIT_QUICKSTART")


def train(out: Path, name: str, *flags: str) -> Path:
    words = [sys.executable, "-m", "tracekit", "train", "--out", str(out), "--name", name, *flags]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return out / name


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_promises(run: Path) -> None:
    accuracy = [line["eval/accuracy"] for line in lines(run) if line.get("event") == "eval"]
    assert accuracy[-1] - accuracy[0] >= GAIN, f"accuracy went from {accuracy[0]:.3f} to {accuracy[-1]:.3f}"
    (final,) = [line for line in lines(run) if line.get("event") == "final"]
    assert final["rows"]["peak memory, MiB"][0] < MEMORY_MIB


def mismatch(run: Path, steps: int) -> float:
    found = [line["mismatch/logprob_abs_diff_mean"] for line in lines(run) if "event" not in line]
    assert len(found) >= steps
    return float(np.mean(found[:steps]))


def variant(run: Path, out: Path, name: str, *flags: str) -> Path:
    """Train a variant from the warm start of `run`."""
    shutil.copytree(run / "warmstart", out / name / "warmstart")
    return train(out, name, *flags)


@pytest.mark.skipif(not given, reason="TRACEKIT_QUICKSTART does not name a finished run")
def test_the_given_run_keeps_the_promises(tmp_path):
    run = Path(given).resolve()
    check_promises(run)
    qat = variant(run, tmp_path, "qat", "--guidance.bits", "0", "--steps", "5", *SAME_RATE)
    assert mismatch(run, 5) <= SHARE * mismatch(qat, 5)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_seeds_keep_the_promises(tmp_path, seed):
    flags = ("--seed", str(seed))
    run = train(tmp_path, "guided", *flags)
    check_promises(run)
    qat = variant(run, tmp_path, "qat", *flags, "--guidance.bits", "0", "--steps", str(STEPS), *SAME_RATE)
    assert mismatch(run, STEPS) <= SHARE * mismatch(qat, STEPS)
