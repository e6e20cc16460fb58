"""Two gloo ranks give the numbers of one process: totals, ACRL's X and Y, loss, gradients and metrics."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from objective_fixtures import f1, packed, rows
from test_fixture_f1 import ROWS
from test_properties import METHODS, evaluate, full_batch

from tracekit.objectives import Metrics, policy_loss, with_totals
from tracekit.objectives.gae import Moments


def step(knobs, parts, group):
    """One step on this rank's parts: loss share, gradients of its responses, merged metrics, X."""
    objective = policy_loss(**knobs)
    objective.begin_batch(parts, group)
    parts = with_totals(parts, objective.totals(parts, group))
    loss, grads, metrics = 0.0, [], Metrics()
    for part in parts:
        out = objective(part)
        (grad,) = torch.autograd.grad(out.loss, part.logp)
        loss += float(out.loss.detach())
        ids = part.segment_ids if part.segment_ids is not None else torch.zeros_like(part.mask, dtype=torch.long)
        grads += grad[part.mask & (ids >= 0)].tolist()
        metrics.merge(out.metrics)
    values = metrics.all_reduce(group).finalize()
    return {"loss": loss, "grads": grads, "metrics": values, "state": objective.state_dict()}


def shares():
    """name → (knobs, this rank's parts by rank)."""
    out = {}
    for label, knobs, *_ in ROWS:
        out[f"f1 {label}"] = (knobs, [[rows(f1(), slice(0, 1))], [packed(rows(f1(), slice(1, 2)))]])
    for label, knobs in METHODS.items():
        b = full_batch(knobs, 8)
        # The prompt of responses 3 to 5 lies on both ranks; rank 0 runs two microbatches, rank 1 one.
        out[label] = (knobs, [[rows(b, slice(0, 2)), rows(b, slice(2, 4))], [rows(b, slice(4, 6))]])
    return out


def run_rank(rank, folder):
    """Body of one rank: every method, results to a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    group = dist.group.WORLD
    results = {name: step(knobs, parts[rank], group) for name, (knobs, parts) in shares().items()}
    x = torch.arange(6, dtype=torch.float64)[rank * 3 : rank * 3 + 3]
    moments = Moments.of(x, torch.ones(3, dtype=torch.bool)).reduced(group)
    results["moments"] = [float(moments.total), float(moments.squares), float(moments.count)]
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(results, f)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen([sys.executable, __file__, str(r), folder], env=env) for r in (0, 1)]
        assert [p.wait(timeout=240) for p in started] == [0, 0]
        yield [json.load(open(f"{folder}/{r}.json")) for r in (0, 1)]


@pytest.mark.parametrize("label", [f"f1 {r[0]}" for r in ROWS])
def test_fixture(ranks, label):
    _, _, loss, grad = next(r for r in ROWS if f"f1 {r[0]}" == label)
    assert sum(r[label]["loss"] for r in ranks) == pytest.approx(loss, abs=1e-5)
    assert sum((r[label]["grads"] for r in ranks), []) == pytest.approx(grad, abs=1e-5)


@pytest.mark.parametrize("label", METHODS)
def test_methods(ranks, label):
    knobs = METHODS[label]
    loss, grad, metrics = evaluate(knobs, [rows(full_batch(knobs, 8), slice(None))])
    assert sum(r[label]["loss"] for r in ranks) == pytest.approx(float(loss), abs=1e-10)
    assert sum((r[label]["grads"] for r in ranks), []) == pytest.approx(grad.tolist(), abs=1e-10)
    for r in ranks:
        assert r[label]["metrics"] == pytest.approx(metrics, rel=1e-7, abs=1e-9)
    assert ranks[0][label]["state"] == ranks[1][label]["state"]


def test_moments(ranks):
    assert ranks[0]["moments"] == ranks[1]["moments"] == [15.0, 55.0, 6.0]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
