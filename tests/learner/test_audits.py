"""Audits of a training run: real activations, sums over steps, and what the command line shows of them."""

import json

import numpy as np
import pytest
import torch
from loop_fixtures import build

from tracekit import config as tk
from tracekit.cli import main
from tracekit.errors import ConfigError
from tracekit.guidance import AuditRows, SiteAudit, audit, audit_tokens, open_dataset
from tracekit.learner import audits
from tracekit.learner.update import Experience

TINY = [
    "--model.n-layers", "2", "--warmstart.steps", "2", "--warmstart.batch-size", "16", "--steps", "3",
    "--task.eval-size", "4", "--task.train-size", "500", "--rollout.prompts-per-step", "4", "--rollout.group-size", "4",
    "--checkpoint.interval", "1", "--guidance.keep-steps", "-1", "--guidance.audit-every", "4",
]  # fmt: skip


def train(out, *flags):
    return main(["train", "--out", str(out), "--name", "r", *TINY, *flags])


def lines(out):
    read = [json.loads(line) for line in (out / "r" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in read if "event" not in line}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert train(out) == 0
    return out


def test_stats_of_a_run_are_real_flips_and_noise(finished, capsys):
    run = finished / "r"
    assert main(["guidance", "stats", str(run)]) == 0
    out = capsys.readouterr().out
    assert "up to step 3: 6 sites audited" in out and "layers.1.moe_input" in out and "->" in out
    found = json.loads((run / "logs" / "audits.json").read_text())
    sites = {name: SiteAudit.from_state(s) for name, s in found["sites"].items()}
    tokens = 0
    for step in (1, 2, 3):
        reader = open_dataset(run / "guidance" / f"step_{step:06d}")
        for traj_id in reader.ids():
            start = reader[traj_id].prefix[1] if reader[traj_id].prefix else 0
            want = audit_tokens(traj_id, start, reader[traj_id].n_tokens, 4)
            got = reader.audit(traj_id)
            assert {tuple(r.tokens) for r in got.values()} <= {tuple(want)} and len(got) == 6 * bool(want)
            tokens += len(want)
    assert tokens > 30
    for name, s in sites.items():
        assert s.rows == tokens * (1 if "moe" in name else 2)
        assert 0 < s.flip_rate < 0.3 and s.adjacency > 0.9 and 1e-4 < s.sigma < 0.1, (name, s.flip_rate, s.sigma)
    for line in lines(finished).values():
        assert 0 < line["guidance/audit_flip_rate"] < 0.3 and 0 < line["guidance/audit_sigma"] < 0.1
        assert 0.9 < line["guidance/audit_adjacency"] <= 1


def test_a_resumed_run_counts_each_step_once(finished, tmp_path, capsys):
    assert train(tmp_path, "--steps", "2") == 0
    two = json.loads((tmp_path / "r" / "logs" / "audits.json").read_text())
    assert train(tmp_path, "--resume") == 0
    whole = json.loads((finished / "r" / "logs" / "audits.json").read_text())
    three = json.loads((tmp_path / "r" / "logs" / "audits.json").read_text())
    assert two["step"] == 2 and three["step"] == whole["step"] == 3
    for name, s in whole["sites"].items():
        assert three["sites"][name]["values"] == s["values"] > two["sites"][name]["values"]


@pytest.mark.parametrize("flags", [(), ("--guidance.mode", "scale_only"), ("--quant.global-scale", "token")])
def test_the_step_audit_is_the_stores_own_with_activations_taken_aside(tmp_path, monkeypatch, flags):
    built = build(tmp_path, "--guidance.audit-every", "3", *flags)
    loop, given = built.loop, {}
    rollouts, rewards = loop.sampler.sample([built.task.train[i] for i in range(4)], 1)
    reader = open_dataset(loop.sampler.folder(1))
    x = Experience.of(rollouts, rewards, reader)
    step = audits.StepAudit(reader, rollouts)
    take = step.take

    def aside(site, values):
        given.setdefault(site, []).append(values.detach().clone())
        take(site, values)

    monkeypatch.setattr(step, "take", aside)
    loop.update.open(x, step)
    got = step.finish()
    batches = list(loop.update.batches(rollouts, np.zeros(16, np.float32), np.arange(16)))
    uids = np.concatenate([b.token_uid.reshape(-1).numpy() for b in batches])
    row_of = {traj_id: row for row, traj_id in reversed(list(enumerate(rollouts.trajectory)))}
    row_of |= {reader[t].prefix[0]: row for t, row in sorted(row_of.items(), key=lambda pair: -pair[1])}

    def activations(traj_id, site, tokens):
        at = [int(np.flatnonzero(uids == (row_of[traj_id] << 32 | int(t)))[0]) for t in tokens]
        return torch.cat(given[site])[at]

    want = audit(reader, activations)
    assert sorted(got) == sorted(want) == sorted(loop.sampler.sites)
    for site, s in want.items():
        assert got[site].rows == s.rows > 0
        assert (got[site].values, got[site].flips, got[site].scale_flips) == (s.values, s.flips, s.scale_flips)
    if not flags:
        owner = next(t for t in reader.ids() if reader[t].prefix is None and reader.audit(t))
        low, rows = reader[owner].read(sites=["layers.1.k"])["layers.1.k"], reader.audit(owner)["layers.1.k"]
        assert isinstance(rows, AuditRows) and rows.codes.max() > 1
        np.testing.assert_array_equal(low.unpack()[rows.tokens], rows.codes & 1)


def test_none_is_audited_where_none_is_asked_for(tmp_path, capsys):
    assert train(tmp_path, "--guidance.audit-every", "0", "--steps", "1") == 0
    assert not any(key.startswith("guidance/audit") for key in lines(tmp_path)[1])
    assert main(["guidance", "stats", str(tmp_path / "r")]) == 4
    assert "guidance.audit_every is 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="audit_every = -1"):
        tk.validate(tk.load([], {"guidance.audit_every": -1}))
