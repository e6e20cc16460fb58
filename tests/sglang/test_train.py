"""`tracekit train` with a real engine: records, replay and publication fit together."""

import json
from pathlib import Path

import numpy as np
import pytest

from tracekit.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


def train(out, name, *flags):
    files = [str(CONFIGS / "quickstart.toml"), str(CONFIGS / "sglang_cpu.toml")]
    assert main(["train", *files, "--out", str(out), "--name", name, *flags]) == 0
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def mismatch(lines):
    return float(np.mean([line["mismatch/logprob_abs_diff_mean"] for line in lines]))


def test_steps_with_the_engine(tmp_path):
    lines = train(tmp_path, "guided", "--guidance.keep-steps", "-1")
    assert len(lines) == 3
    for line in lines:
        assert line["guidance/bytes_per_token"] > 0
        assert line["policy/nonfinite_tokens"] == 0
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    assert mismatch(lines) < 0.01  # plain QAT: 0.02
    steps = sorted(p.name for p in (tmp_path / "guided" / "guidance").iterdir())
    assert steps == ["step_000001", "step_000002", "step_000003"]


def test_a_budget_that_binds_brings_checkpoints_early(tmp_path):
    free = tmp_path / "free"
    lines = train(free, "run", "--guidance.keep-steps", "-1", "--steps", "2")
    folder = free / "run" / "guidance"
    largest = max(sum(f.stat().st_size for f in step.iterdir()) for step in folder.iterdir())
    lines = train(tmp_path, "run", "--guidance.byte-budget", str(int(1.5 * largest)), "--steps", "3")
    assert [line["guidance/early_checkpoint"] for line in lines][:2] == [1, 1]
    assert all(line["guidance/budget_frac"] <= 1 for line in lines)
    assert [p.name for p in (tmp_path / "run" / "guidance").iterdir()] == ["step_000003"]


@pytest.mark.long
def test_guidance_closes_the_gap_to_the_engine(tmp_path):
    guided = mismatch(train(tmp_path, "guided"))
    plain = mismatch(train(tmp_path, "qat", "--guidance.bits", "0"))
    assert guided < plain / 3, (guided, plain)
