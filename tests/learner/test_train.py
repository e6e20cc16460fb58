"""`tracekit train` at its smallest: guided, plain QAT and BF16; resume; records that do not belong."""

import json
import shutil

import numpy as np
import pytest
import torch

from tracekit import config as tk
from tracekit.cli import main
from tracekit.errors import DataError
from tracekit.guidance import open_dataset
from tracekit.learner.learner import Learner
from tracekit.learner.loop import Loop
from tracekit.learner.records import load_records
from tracekit.learner.state import LoopState
from tracekit.runs import RunFolder
from tracekit.tasks import CharTokenizer, load_task

TINY = [
    "--model.n-layers", "2", "--warmstart.steps", "3", "--warmstart.batch-size", "16", "--steps", "4",
    "--task.eval-size", "16", "--task.train-size", "2000", "--rollout.prompts-per-step", "4",
    "--rollout.group-size", "4",
    "--checkpoint.interval", "2", "--guidance.keep-steps", "-1",
]  # fmt: skip


def train(out, *flags):
    return main(["train", "--out", str(out), "--name", "r", *TINY, *flags])


def steps(out):
    lines = [json.loads(line) for line in (out / "r" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "event" not in line}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert train(out) == 0
    return out


def test_a_run_leaves_metrics_guidance_and_checkpoints(finished):
    metrics = steps(finished)
    assert sorted(metrics) == [1, 2, 3, 4]
    for line in metrics.values():
        assert 0 < line["mismatch/logprob_abs_diff_mean"] < 0.1
        assert line["guidance/bytes_per_token"] > 0
        assert 0 < line["guidance/flip_rate"] < 0.5
    run = finished / "r"
    assert (run / "checkpoints" / "step_000004" / "COMPLETE").exists()
    assert main(["guidance", "verify", str(run / "guidance" / "step_000004")]) == 0
    reader = open_dataset(run / "guidance" / "step_000001")
    assert len(reader) == 4 + 16  # prompts once, then their responses


def test_resume_continues_as_if_nothing_had_happened(finished, tmp_path):
    assert train(tmp_path, "--steps", "2") == 0
    assert train(tmp_path, "--resume") == 0
    whole, resumed = steps(finished), steps(tmp_path)
    assert sorted(resumed) == [1, 2, 3, 4]
    for step in (3, 4):
        for key, value in whole[step].items():
            if not key.startswith("time"):
                assert resumed[step][key] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, key)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_resume_keeps_critic_reference_and_x(tmp_path, critic):
    flags = (
        "--algo.name", "ppo", "--algo.correction", "acrl", "--algo.critic", critic, "--algo.kl-coef", "0.1",
        "--algo.kl-reward-coef", "0.1", "--optim.logit-chunk-tokens", "16", "--log.rollouts",
    )  # fmt: skip
    assert train(tmp_path / "whole", *flags, "--steps", "3") == 0
    assert train(tmp_path / "parts", *flags, "--steps", "2") == 0
    assert train(tmp_path / "parts", *flags, "--steps", "3", "--resume") == 0
    whole, resumed = steps(tmp_path / "whole"), steps(tmp_path / "parts")
    assert whole[3]["acrl/X"] == whole[1]["acrl/X"] and whole[3]["policy/kl_ref"] > 0
    for key, value in whole[3].items():
        if not key.startswith("time"):
            assert resumed[3][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    parts = tmp_path / "parts" / "r"
    histograms = (parts / "logs" / "histograms.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in histograms] == [1, 2, 3]
    lines = [json.loads(line) for line in (parts / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and {line["version"] for line in lines} == {2}
    assert sum(line["accuracy"] for line in lines) / 16 == pytest.approx(resumed[3]["reward/mean"])
    assert all(line["logp_mu"] < 0 and line["trajectory"].startswith("000003.") for line in lines)


def test_a_second_run_needs_a_word_and_reuses_the_warm_start(finished, tmp_path, capfd):
    shutil.copytree(finished / "r", tmp_path / "r")
    assert train(tmp_path) == 2
    error = capfd.readouterr().err
    assert "--resume" in error and "--clean" in error and error.count("\n") == 1
    assert train(tmp_path, "--clean", "--steps", "1") == 0
    assert "warm start from" in capfd.readouterr().out
    assert steps(tmp_path)[1]["reward/mean"] == steps(finished)[1]["reward/mean"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--guidance.bits", "0"),
        ("--quant.experts", "none", "--quant.kv", "none"),
        ("--guidance.mode", "scale_only", "--guidance.layers", "last_half"),
        ("--guidance.bits", "4", "--quant.global-scale", "token", "--guidance.rounding", "bracket_open"),
        ("--guidance.bits", "2", "--quant.experts", "mxfp4-rceil", "--quant.kv", "kv-mx16", "--replay.routing", "off"),
    ],
)
def test_the_switches_share_one_path(tmp_path, flags):
    assert train(tmp_path, "--steps", "1", *flags) == 0
    line = steps(tmp_path)[1]
    assert np.isfinite(line["mismatch/logprob_abs_diff_mean"])
    recorded = "guidance/bytes_per_token" in line
    assert recorded == ("scale_only" in flags or ("--guidance.bits" in flags and "0" not in flags))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """One sampled step with guidance on disk: loop, rollouts, reader."""
    c = tk.load([tk.quickstart()], ["--out", str(tmp_path_factory.mktemp("loop")), *TINY])
    run = RunFolder.create(c)
    task = load_task(c.task, c.seed)
    tokenizer = CharTokenizer.for_task(task)
    learner = Learner(c, tokenizer.vocab_size, device=torch.device("cpu"))
    scales = {f"layers.{i}.{k}": 128.0 for i in range(2) for k in ("moe_input", "moe_hidden", "k", "v")}
    loop = Loop(c, run, learner, task, tokenizer, LoopState(static_scales=scales))
    rollouts, _ = loop.sampler.sample([task.train[i] for i in range(4)], 1)
    yield loop, rollouts, open_dataset(loop.sampler.folder(1))
    run.release()


def batches(loop, rollouts):
    n = len(rollouts.group)
    return list(loop.update.batches(rollouts, np.zeros(n, np.float32), np.arange(n)))


def test_records_are_the_rounding_of_the_engines_own_cache(sampled):
    """The learner's K and V under guidance carry the very codes that the engine's cache held."""
    loop, rollouts, reader = sampled
    (batch,) = batches(loop, rollouts)
    records = load_records(reader, batch, rollouts, loop.sampler.sites)
    assert sorted(records) == sorted(f"layers.{i}.{k}" for i in range(2) for k in ("moe_input", "k", "v"))
    real = (batch.token_uid.reshape(-1) >= 0).numpy()
    for record in records.values():
        assert record.codes.max() == 1  # one bit
        assert (record.scales[~real] == 0).all()
        assert (record.scales[real] > 0).float().mean() > 0.99


def test_wrong_tokens_are_an_error(sampled):
    loop, rollouts, reader = sampled
    (batch,) = batches(loop, rollouts)
    batch.tokens[batch.token_uid >= 0] += 1
    with pytest.raises(DataError, match="uid"):
        load_records(reader, batch, rollouts, loop.sampler.sites)


def test_records_of_other_tokens_are_an_error(sampled):
    loop, rollouts, reader = sampled
    tokens = rollouts.tokens.copy()
    try:
        rollouts.tokens[:, 1] += 1  # the same trajectories, re-tokenised
        (batch,) = batches(loop, rollouts)
        with pytest.raises(DataError, match="token"):
            load_records(reader, batch, rollouts, loop.sampler.sites)
    finally:
        rollouts.tokens[:] = tokens


def test_a_missing_trajectory_is_named(sampled):
    loop, rollouts, reader = sampled
    (batch,) = batches(loop, rollouts)
    names = list(rollouts.trajectory)
    try:
        rollouts.trajectory[0] = "000001.9999.00"
        with pytest.raises(DataError, match="000001.9999.00"):
            load_records(reader, batch, rollouts, loop.sampler.sites)
    finally:
        rollouts.trajectory[:] = names
