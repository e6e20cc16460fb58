import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tracekit import config as tk
from tracekit import runs
from tracekit.errors import ConfigError, DataError


def config(tmp_path, **overrides):
    return tk.load([], {"out": str(tmp_path), "name": "r", **overrides})


def start(tmp_path, **arguments):
    overrides = arguments.pop("overrides", {})
    run = runs.RunFolder.create(config(tmp_path, **overrides), **arguments)
    run.release()
    return run


def checkpoint(run, step, text="weights"):
    folder = run.checkpoint_dir(step)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a.bin").write_text(text)
    (folder / "state.json").write_text("{}")
    runs.write_complete(folder)
    return folder


def test_a_new_folder_has_every_part(tmp_path):
    run = start(tmp_path, sources={"name": "--name"})
    names = {entry.name for entry in run.path.iterdir()} - {".lock"}
    assert names == {
        "config.toml",
        "resolved.json",
        "env.json",
        "checkpoints",
        "guidance",
        "rollouts",
        "logs",
        "warmstart",
    }
    assert tk.load([run.path / "config.toml"]) == config(tmp_path)
    assert json.loads((run.path / "resolved.json").read_text())["sources"] == {"name": "--name"}
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["packages"]["torch"] and environment["cpus"] >= 1


def test_a_folder_with_a_run_is_refused_and_untouched(tmp_path):
    run = start(tmp_path)
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError) as error:
        start(tmp_path, overrides={"seed": 9})
    assert "--resume" in str(error.value) and "--clean" in str(error.value) and "\n" not in str(error.value)
    assert run.metrics.read_text() == '{"step": 1}\n'
    assert tk.load([run.path / "config.toml"]).seed == 0


def test_clean_removes_the_run_and_keeps_the_warm_start(tmp_path):
    run = start(tmp_path)
    checkpoint(run, 1)
    run.metrics.write_text('{"step": 1}\n')
    (run.warmstart / "cached").write_text("x")
    again = start(tmp_path, clean=True)
    assert not again.metrics.exists() and again.latest_complete() is None
    assert (again.warmstart / "cached").read_text() == "x"


def test_other_peoples_files_are_never_cleaned(tmp_path):
    (tmp_path / "r" / "logs").mkdir(parents=True)
    (tmp_path / "r" / "logs" / "precious").write_text("x")
    for arguments in ({}, {"clean": True}):
        with pytest.raises(ConfigError, match="holds other files"):
            start(tmp_path, **arguments)
    assert (tmp_path / "r" / "logs" / "precious").exists()


def test_resume_and_clean_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="give one"):
        start(tmp_path, resume=True, clean=True)


def test_resume_needs_a_run_and_a_complete_checkpoint(tmp_path):
    with pytest.raises(DataError, match="holds no run to resume"):
        start(tmp_path, resume=True)
    run = start(tmp_path)
    run.checkpoint_dir(1).mkdir()
    with pytest.raises(DataError, match="no complete checkpoint"):
        start(tmp_path, resume=True)


def test_resume_takes_the_latest_complete_checkpoint(tmp_path):
    run = start(tmp_path)
    for step in (5, 10):
        checkpoint(run, step)
    (run.checkpoint_dir(15)).mkdir()
    resumed = start(tmp_path, resume=True)
    assert resumed.resumed_from == run.checkpoint_dir(10)
    assert not run.checkpoint_dir(15).exists()


@pytest.mark.parametrize("damage", ["truncate", "remove", "marker"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, damage):
    run = start(tmp_path)
    checkpoint(run, 5)
    bad = checkpoint(run, 10)
    if damage == "truncate":
        (bad / "model" / "a.bin").write_text("weigh")
    elif damage == "remove":
        (bad / "model" / "a.bin").unlink()
    else:
        (bad / runs.COMPLETE).write_text("{")
    resumed = start(tmp_path, resume=True)
    assert resumed.resumed_from == run.checkpoint_dir(5)
    assert "step_000010" in resumed.notes[0]
    assert not bad.exists() and len(list(run.checkpoints.glob("damaged_*"))) == 1


@pytest.mark.parametrize(
    "overrides", [{"steps": 99}, {"log.eval_interval": 3}, {"checkpoint.interval": 7}, {"guidance.keep_steps": -1}]
)
def test_resume_allows_what_does_not_change_training(tmp_path, overrides):
    checkpoint(start(tmp_path), 5)
    assert start(tmp_path, resume=True, overrides=overrides).resumed_from


def test_resume_says_that_other_steps_change_the_schedule(tmp_path):
    checkpoint(start(tmp_path), 5)
    assert start(tmp_path, resume=True).notes == []
    assert "steps = 99 instead of" in start(tmp_path, resume=True, overrides={"steps": 99}).notes[0]
    assert start(tmp_path, resume=True, overrides={"steps": 99}).notes == []


def test_resume_refuses_what_changes_training(tmp_path):
    checkpoint(start(tmp_path), 5)
    changed = {"optim.lr": 1.0, "task.params": {"max_terms": 3}, "steps": 99}
    with pytest.raises(ConfigError) as error:
        start(tmp_path, resume=True, overrides=changed)
    assert "another task.params, optim.lr;" in str(error.value)


def test_a_key_that_the_old_run_did_not_know_counts_with_its_default():
    before = tk.to_dict(tk.Config())
    del before["optim"]["beta2"], before["replay"]
    assert runs.differing_keys(before, tk.Config()) == []
    assert runs.differing_keys(before, tk.load([], {"replay.routing": "off"})) == ["replay.routing"]


def test_metrics_of_steps_that_run_again_are_set_aside(tmp_path):
    run = start(tmp_path)
    checkpoint(run, 2)
    lines = ['{"event": "warm start"}', '{"step": 1}', '{"step": 2}', '{"step": 3}', '{"step": 4, "rew']
    run.metrics.write_text("\n".join(lines))
    start(tmp_path, resume=True)
    assert run.metrics.read_text().splitlines() == lines[:3]
    assert (run.logs / "discarded.jsonl").read_text().splitlines() == lines[3:]


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path):
    run = start(tmp_path)
    for step in (1, 2, 3):
        checkpoint(run, step)
    run.checkpoint_dir(4).mkdir()
    run.prune_checkpoints(2)
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step_000002", "step_000003", "step_000004"]


def test_the_warm_start_depends_on_what_shapes_it_only(tmp_path):
    run = start(tmp_path)
    name = run.warmstart_dir(config(tmp_path)).name
    assert run.warmstart_dir(config(tmp_path, **{"guidance.bits": 0, "steps": 3})).name == name
    for change in (
        {"seed": 1},
        {"quant.kv": "none"},
        {"model.dim": 32},
        {"warmstart.lr": 1.0},
        {"task.params": {"max_terms": 3}},
    ):
        assert run.warmstart_dir(config(tmp_path, **change)).name != name


def test_a_folder_in_use_is_refused_until_its_holder_is_gone(tmp_path):
    code = (
        "import sys, time; from tracekit import config as tk; from tracekit.runs import RunFolder\n"
        f"run = RunFolder.create(tk.load([], {{'out': {str(tmp_path)!r}, 'name': 'r'}})); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            start(tmp_path, clean=True)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    start(tmp_path, clean=True)


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(runs.fcntl, "flock", flock)
    assert "no lock on" in start(tmp_path).notes[0]


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "r").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write the run's folder"):
        start(tmp_path)


def test_no_reader_ever_sees_half_a_file(tmp_path):
    path = tmp_path / "x.json"
    runs.write_atomic(path, "a" * 10)
    code = f"""
from pathlib import Path
from tracekit.runs import write_atomic
while True:
    for letter in "ab":
        write_atomic(Path({str(path)!r}), letter * 1_000_000)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        time.sleep(0.7)
        for _ in range(50):
            text = path.read_text()
            assert len(set(text)) == 1 and len(text) in (10, 1_000_000)
        writer.kill()
    text = path.read_text()
    assert len(set(text)) == 1 and len(text) == 1_000_000
