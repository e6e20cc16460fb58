"""A trainer whose own engine dies: it says so and ends as an engine's error ends a run."""

import json
import time
from pathlib import Path

import psutil
import pytest
from serving import end, tracekit

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[2] / "configs"


def train(out, log, *flags):
    files = [str(CONFIGS / "quickstart.toml"), str(CONFIGS / "sglang_cpu.toml")]
    words = ["--out", str(out), "--name", "run", "--checkpoint.interval", "1", *flags]
    return tracekit("train", *files, *words, log=log)


def steps(out):
    path = out / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "event" not in line]


def test_a_killed_scheduler_is_an_error_and_the_run_resumes(tmp_path):
    with open(tmp_path / "train.log", "wb") as log:
        trainer = train(tmp_path, log, "--steps", "50")
        try:
            until = time.monotonic() + 400
            while not steps(tmp_path):
                assert trainer.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            family = psutil.Process(trainer.pid).children(recursive=True)
            (scheduler,) = [p for p in family if "".join(p.cmdline()[:1]).startswith("sglang::scheduler")]
            scheduler.kill()
            assert trainer.wait(60) == 3
        finally:
            end(trainer)
    said = (tmp_path / "train.log").read_text()
    assert "the SGLang engine died" in said and "--resume" in said
    done = steps(tmp_path)
    with open(tmp_path / "again.log", "wb") as log:
        trainer = train(tmp_path, log, "--resume", "--steps", str(done[-1] + 1))
        try:
            assert trainer.wait(400) == 0, (tmp_path / "again.log").read_text()
        finally:
            end(trainer)
    assert steps(tmp_path) == [*done, done[-1] + 1]
