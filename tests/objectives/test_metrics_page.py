"""docs/metrics.md and what is logged, each against the other: nothing undocumented, nothing promised in vain."""

import json
import re
from pathlib import Path

import pytest
import torch
from test_properties import METHODS, full_batch

from tracekit.cli import main
from tracekit.objectives import policy_loss

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SMALL = [
    "--model.n-layers", "2", "--warmstart.steps", "40", "--warmstart.batch-size", "64", "--steps", "2",
    "--task.eval-size", "8", "--task.train-size", "2000", "--rollout.prompts-per-step", "8",
    "--rollout.group-size", "8", "--log.eval-interval", "1", "--log.by-layer",
]  # fmt: skip
RUNS = {
    "grpo": ["--algo.mini-steps", "2", "--algo.kl-coef", "0.1", "--algo.overlong-buffer", "2"],
    "dapo": ["--algo.name", "dapo", "--algo.dynamic-sampling", "--algo.max-sampling-rounds", "20"],
    "ppo": ["--algo.name", "ppo", "--algo.correction", "acrl"],
    "tbpo": ["--algo.name", "tbpo", "--algo.correction", "none", "--guidance.byte-budget", "100000000"],
    "rm15": ["--model.dim", "256", "--model.head-dim", "128", "--guidance.encoding", "rm15", "--warmstart.steps", "0"],
}
NOT_METRICS = {"step", "time", "event"}


def documented() -> dict[str, re.Pattern]:
    """Name on the page -> what it covers: {a,b} and {1..4} are a name each, {word} and * stand for anything."""
    names = {}
    for token in re.findall(r"`([a-z_]+/[^`]+)`", PAGE.read_text()):
        if token.endswith((".jsonl", "/")):
            continue
        grown = [token]
        while choice := re.search(r"\{([^}]*(?:,|\.\.)[^}]*)\}", grown[0]):
            ends = re.fullmatch(r"(\d)\.\.(\d)", choice[1])
            options = range(int(ends[1]), int(ends[2]) + 1) if ends else choice[1].split(",")
            grown = [g.replace(choice[0], str(o), 1) for g in grown for o in options]
        for name in grown:
            pattern = re.escape(re.sub(r"\{\w+\}", "\0", name).replace("*", "\1"))
            names[name] = re.compile(pattern.replace("\0", "[^/]+").replace("\1", ".+"))
    return names


def logged_by_objectives() -> set[str]:
    """By every pair of surrogate and correction, on responses of current and older weights, one of them long."""
    names = set()
    for knobs in METHODS.values():
        batch = full_batch(knobs, 1).with_(version_lag=torch.tensor([0, 1, 0, 1, 0, 1]))
        names |= logged(knobs, batch)
    return names | logged({"name": "grpo"}, full_batch({}, 2, n=3, length=6000))


def logged(knobs, batch) -> set[str]:
    objective = policy_loss(**knobs)
    objective.begin_batch([batch])
    metrics = objective(batch).metrics
    return {*metrics.finalize(), *metrics.histograms()}


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """Every name that the runs write to metrics.jsonl, and that the objectives give."""
    out, names = tmp_path_factory.mktemp("metrics"), logged_by_objectives()
    for run, flags in RUNS.items():
        assert main(["train", "--out", str(out), "--name", run, *SMALL, *flags]) == 0
        for line in (out / run / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            if values.get("event") != "final":
                names |= set(values) - NOT_METRICS
    return names


def test_every_logged_metric_is_on_the_page(emitted):
    patterns = documented().values()
    assert len(emitted) > 150
    assert sorted(n for n in emitted if not any(p.fullmatch(n) for p in patterns)) == []


def test_every_metric_of_the_page_is_logged(emitted):
    assert len(documented()) > 120
    assert sorted(name for name, p in documented().items() if not any(p.fullmatch(n) for n in emitted)) == []
