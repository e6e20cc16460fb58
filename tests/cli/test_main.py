"""The command as a person runs it: real processes, exit codes, and what is on stdout and stderr."""

import functools
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys

import pytest

import tracekit

COMMAND = [sys.executable, "-m", "tracekit"]


@pytest.fixture
def run(tmp_path):
    """Run `tracekit ...` in an empty folder."""

    def _run(*words, code=None, **environment):
        command = [sys.executable, "-c", code, *words] if code else [*COMMAND, *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
        )

    return _run


def fake_learner(body):
    """A program that is `tracekit`, with another training loop behind it: the error policy is what is under test."""
    return f"""
import importlib.util, sys, types
module = types.ModuleType("tracekit.learner.run")
source = '''
def train(config, run, resume, log):
{body}
'''
exec(source, module.__dict__)
package = types.ModuleType("tracekit.learner")
package.__path__ = []
sys.modules["tracekit.learner"], sys.modules["tracekit.learner.run"] = package, module
spec = importlib.util.find_spec("tracekit.objectives")
objectives = importlib.util.module_from_spec(spec)  # not executed: the real one takes seconds to import
objectives.from_config = lambda algo, rollout: None
objectives.unused_keys = lambda algo, keys: []
sys.modules["tracekit.objectives"] = objectives
from tracekit.cli import main
sys.exit(main())
"""


def test_help_and_import_are_quick_and_load_nothing_heavy(run):
    code = """
import sys, time
start = time.process_time()  # the machine may be busy with other tests
import tracekit
from tracekit.cli import main
for words in ([], ["--help"], ["train", "--help"]):
    assert main(words) == 0
spent = time.process_time() - start
assert not {"torch", "torchtitan", "numpy", "reasoning_gym", "rich"} & set(sys.modules), "heavy import"
assert spent < 0.5, spent
"""
    result = run(code=code)
    assert result.returncode == 0, result.stderr


def test_the_installed_command_answers_in_half_a_second():
    script = os.path.join(os.path.dirname(sys.executable), "tracekit")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([script, "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0 and "train" in result.stdout and "guidance" in result.stdout
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


def test_version(run):
    assert run("--version").stdout.strip() == f"tracekit {tracekit.__version__}"


def test_train_help_lists_every_key(run):
    from tracekit import config as tk

    text = run("train", "--help", COLUMNS="100").stdout
    assert [path for path in tk.to_flat(tk.Config()) if f"--{path.replace('_', '-')} " not in text] == []
    assert "--resume" in text and "--dry-run" in text and "--clean" in text


def test_an_unknown_command_is_a_usage_error(run):
    result = run("trian")
    assert result.returncode == 2 and "trian" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--guidance.bit", "1"], "unknown key guidance.bit from --guidance.bit; the nearest valid key is guidance.bi"),
        (["nowhere.toml"], "no such configuration file: nowhere.toml"),
        (["--model.head-dim", "24"], "model.head_dim = 24 is not a multiple of 16, the block of quant.kv"),
        (["--rollout.group-size", "1"], "rollout.group_size = 1: must be at least 2"),
        (["--quant.kv", "fp8"], "expected one of none, nvfp4-exact, mxfp4-rceil, kv-mx16"),
        (["--resume", "--clean"], "give one of them"),
        (["-x"], "unknown option -x"),
        (["--algo.name", "grop"], "algo.name = 'grop': expected one of"),
    ],
)
def test_a_configuration_error_is_one_line_and_exit_code_2(run, tmp_path, words, message):
    result = run("train", *words)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tracekit: error: ") and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_knob_is_refused_before_anything_is_made(run, tmp_path):
    result = run("train", "--algo.knobs.clip_ratio_hihg", "0.3")
    assert result.returncode == 2 and "clip_ratio_high" in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_in_a_file_names_the_file(run, tmp_path):
    (tmp_path / "mine.toml").write_text("[algo]\nclip_high = 0.3\n")
    result = run("train", "mine.toml", "--dry-run")
    assert result.returncode == 2
    assert "unknown key algo.clip_high in mine.toml; the nearest valid key is algo.clip_ratio_high" in result.stderr


def test_dry_run_shows_values_sources_plan_and_sizes_and_trains_nothing(run, tmp_path):
    (tmp_path / "mine.toml").write_text("seed = 4\n[guidance]\nlayers = 'last:1'\n")
    result = run("train", "mine.toml", "--guidance.bits", "2", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert re.search(r"seed = 4 +<- mine.toml", result.stdout)
    assert re.search(r"guidance.bits = 2 +<- --guidance.bits", result.stdout)
    assert len(re.findall(r"layers\.\d+\.k .* -$", result.stdout, re.M)) == tracekit_layers() - 1
    assert re.search(r"per token +\d+ B for \d+ values, 2.50 bit a value", result.stdout)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]


def test_dry_run_says_what_an_encoding_saves(run):
    text = run("train", "--dry-run", "--guidance.encoding", "compact", "--model.dim", "256").stdout
    assert re.search(r"encoding +3 of 9 sites are wide enough for compact: 192 B per token", text), text


def tracekit_layers():
    from tracekit.config import Config

    return Config().model.n_layers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algo.methods.grpo.clip_ratio_hgh", "0.2"], "clip_ratio_high"),
        (["--algo.name", "reinforce", "--algo.correction", "qurl"], "qurl"),
        (["--algo.knobs.gamma", "2"], "gamma"),
    ],
)
def test_dry_run_refuses_what_training_would(run, flags, message):
    for words in (["--dry-run"], []):
        result = run("train", *words, *flags)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) <= 3


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_is_not_installed_is_refused_before_training(run, tmp_path):
    result = run("train", "--rollout.engine", "sglang")
    assert result.returncode == 3 and "SGLang is not installed" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_keys_that_the_method_does_not_read_are_named(run):
    text = run("train", "--dry-run", "--algo.name", "gspo", "--algo.clip-ratio-c", "3", "--algo.is-cap", "4").stdout
    assert text.splitlines()[-1] == "not read by gspo with correction tis: algo.clip_ratio_c (--algo.clip-ratio-c)"
    assert "not read by" not in run("train", "--dry-run").stdout
    assert "algo.gae_lambda" in run("train", "--dry-run", "--algo.gae-lambda", "0.9").stdout.splitlines()[-1]
    assert "not read by" not in run("train", "--dry-run", "--algo.name", "ppo", "--algo.gae-lambda", "0.9").stdout


def test_dry_run_of_bf16_and_of_plain_qat_says_why_nothing_is_recorded(run):
    bf16 = run("train", "--dry-run", "--quant.experts", "none", "--quant.kv", "none").stdout
    assert "nothing is recorded: none of guidance.sites is quantised" in bf16
    assert "nothing is recorded: guidance.bits is 0" in run("train", "--dry-run", "--guidance.bits", "0").stdout


def test_dry_run_refuses_a_task_that_cannot_fit(run):
    result = run("train", "--dry-run", "--rollout.max-response-len", "2")
    assert result.returncode == 2 and "rollout.max_response_len = 2" in result.stderr


def test_a_folder_that_holds_a_run_is_refused_and_nothing_is_lost(run, tmp_path):
    program = fake_learner("    run.metrics.write_text('kept')\n    return 0")
    assert run("train", code=program).returncode == 0
    again = run("train", code=program)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
    assert "runs/quickstart already holds a run" in again.stderr
    assert "--resume" in again.stderr and "--clean" in again.stderr
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text() == "kept"
    resumed = run("train", "--resume", code=program)
    assert resumed.returncode == 4 and "no complete checkpoint" in resumed.stderr
    assert run("train", "--clean", code=program).returncode == 0


def test_an_unexpected_error_is_one_line_with_the_traceback_in_the_log_file_only(run, tmp_path):
    result = run("train", code=fake_learner("    raise RuntimeError('a bug\\\\nof two lines')"))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "tracekit: error: RuntimeError: a bug of two lines (traceback in runs/quickstart/logs/train.log)"
    ]
    assert "Traceback" not in result.stdout
    log = (tmp_path / "runs" / "quickstart" / "logs" / "train.log").read_text()
    assert "Traceback" in log and "RuntimeError: a bug" in log


def test_an_unexpected_error_without_a_run_goes_to_a_temporary_log(run, tmp_path):
    code = """
import sys
import tracekit.config
def broken(path): raise RuntimeError("early")
sys.modules["tracekit.config.load"]._read = broken
from tracekit.cli import main
sys.exit(main(["train"]))
"""
    result = run(code=code, TMPDIR=str(tmp_path))
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    path = re.search(r"traceback in (.*)\)", result.stderr)[1]
    assert "RuntimeError: early" in open(path).read()


@pytest.mark.parametrize(("kind", "code"), [("EngineError", 3), ("DataError", 4), ("TracekitError", 1)])
def test_errors_of_ours_have_their_exit_codes_and_at_most_three_lines(run, tmp_path, kind, code):
    body = f"    from tracekit.errors import {kind}\n    raise {kind}('what\\\\nwhere\\\\nwhat to do\\\\nand more')"
    result = run("train", code=fake_learner(body))
    assert result.returncode == code
    assert result.stderr.splitlines() == ["tracekit: error: what", "where", "what to do"]
    assert f"{kind}: what" in (tmp_path / "runs" / "quickstart" / "logs" / "train.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_130_and_names_the_checkpoint(tmp_path, number):
    body = """
    import time
    from tracekit.runs import write_complete
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        folder = run.checkpoint_dir(7)
        folder.mkdir()
        write_complete(folder)
        raise
"""
    command = [sys.executable, "-c", fake_learner(body), "train"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True, preexec_fn=heard) as process:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.splitlines() == ["tracekit: interrupted; continue with --resume (step_000007)"]


def test_the_learner_gets_the_configuration_the_folder_and_the_log(run, tmp_path):
    body = """
    assert (config.guidance.bits, config.quant.kv, resume) == (0, "none", False)
    with log.phase("warm start", 2) as phase:
        phase.advance(2, loss=0.5)
    log.step(1, {"reward/mean": 0.5, "time/step": 1.0})
    log.final([("accuracy", 0.25, 0.5)])
    return 0
"""
    result = run("train", "--guidance.bits", "0", "--quant.kv=none", code=fake_learner(body))
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs" / "quickstart"
    assert result.stdout == (folder / "logs" / "train.log").read_text()
    assert "\x1b" not in result.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 1 and lines[-1]["event"] == "final"
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved["sources"]["guidance.bits"] == "--guidance.bits"


def test_warnings_of_libraries_go_to_the_log_file(run, tmp_path):
    body = """
    import logging, warnings
    warnings.warn("a deprecated thing")
    logging.getLogger("torch.deep.inside").warning("a noisy thing")
    return 0
"""
    result = run("train", code=fake_learner(body))
    log = (tmp_path / "runs" / "quickstart" / "logs" / "train.log").read_text()
    assert (result.returncode, result.stderr) == (0, "")
    for thing in ("a deprecated thing", "a noisy thing"):
        assert thing in log and thing not in result.stdout


def test_a_closed_pipe_is_no_traceback(run, tmp_path):
    pipe = f"{sys.executable} -m tracekit train --help | head -1"
    result = subprocess.run(pipe, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == "" and result.stdout.startswith("usage: tracekit train")
