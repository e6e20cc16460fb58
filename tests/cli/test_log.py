import io
import json
import time

import pytest

from tracekit.log import COLUMNS, StepLog, Timer


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Scalar:
    def item(self):
        return 2.5


def test_metrics_are_one_json_object_a_step_and_flushed(tmp_path):
    log = StepLog(tmp_path / "metrics.jsonl", stream=io.StringIO())
    log.step(1, {"reward/mean": 0.25, "loss": Scalar(), "bad": float("nan"), "time/step": 1.0})
    (first,) = lines(tmp_path / "metrics.jsonl")
    assert first.pop("time") == pytest.approx(time.time(), abs=60)
    assert first == {"step": 1, "reward/mean": 0.25, "loss": 2.5, "bad": None, "time/step": 1.0}
    log.event("evaluation", {"acc": 0.5}, step=1)
    assert lines(tmp_path / "metrics.jsonl")[1]["event"] == "evaluation"
    log.close()


def test_step_lines_align_with_their_header():
    out = io.StringIO()
    with StepLog(stream=out) as log:
        log.step(1, {key: 1.0 for _, key, _ in COLUMNS})
        log.step(20, {key: 12.3456 for _, key, _ in COLUMNS[:4]})
    header, *rows = out.getvalue().splitlines()
    assert len({len(header), *map(len, rows)}) == 1
    assert [title for title, _, _ in COLUMNS if title not in header] == []
    assert rows[1].split()[0] == "20" and rows[1].split()[-1] == "-"


def test_plain_output_has_no_control_sequence_and_goes_to_the_log_file_too(tmp_path):
    out = io.StringIO()
    with StepLog(None, tmp_path / "train.log", stream=out, total_steps=2) as log:
        with log.phase("warm start", 4) as phase:
            for _ in range(4):
                phase.advance(1, loss=0.5)
        log.step(1, {"time/step": 2.0, "time/rollout": 1.5})
        log.final([("accuracy", 0.25, 0.75)])
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert (tmp_path / "train.log").read_text() == text
    assert "warm start" in text and "4/4" in text and "loss 0.5" in text


def test_a_terminal_gets_a_bar_and_the_same_lines(tmp_path):
    out = io.StringIO()
    with StepLog(None, tmp_path / "train.log", stream=out, total_steps=2, tty=True) as log:
        with log.phase("warm start", 2) as phase:
            phase.advance(2)
        log.step(1, {"reward/mean": 0.125})
        log.step(2, {"reward/mean": 0.875})
    assert "\x1b" in out.getvalue()
    plain = (tmp_path / "train.log").read_text()
    assert "\x1b" not in plain
    for row in plain.splitlines():
        assert row in out.getvalue()


def test_the_final_table_has_before_after_and_where_the_time_went(tmp_path):
    out = io.StringIO()
    with StepLog(tmp_path / "metrics.jsonl", stream=out) as log:
        for step in (1, 2):
            log.step(step, {"time/step": 2.0, "time/rollout": 1.5, "time/learner": 0.4})
        log.final([("accuracy", 0.25, 0.75), ("guidance bytes per token", 12.0)])
    assert [row.split() for row in out.getvalue().splitlines()[3:]] == [
        ["before", "after"],
        ["accuracy", "0.25", "0.75"],
        ["guidance", "bytes", "per", "token", "12"],
        ["where", "the", "time", "of", "the", "steps", "went,", "4.0", "s"],
        ["rollout", "3.0", "s", "75", "%"],
        ["learner", "0.8", "s", "20", "%"],
        ["other", "0.2", "s", "5", "%"],
    ]
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["event"] == "final" and last["rows"]["accuracy"] == [0.25, 0.75]
    assert last["times"] == {"time/step": 4.0, "time/rollout": 3.0, "time/learner": 0.8}


def test_a_resumed_run_counts_the_steps_before_it(tmp_path):
    for step in (1, 2):
        out = io.StringIO()
        with StepLog(tmp_path / "metrics.jsonl", stream=out) as log:
            log.step(step, {"time/step": 2.0, "time/rollout": 1.5, "reward/mean": step})
            log.event("eval", {"eval/accuracy": 0.5})
            assert [line["reward/mean"] for line in log.recorded()] == list(range(1, step + 1))
            log.final([])
    assert "went, 4.0 s" in out.getvalue()


def test_a_phase_that_fails_says_how_far_it_came():
    out = io.StringIO()
    with pytest.raises(ValueError, match="boom"), StepLog(stream=out) as log, log.phase("evaluation", 10) as phase:
        phase.advance(3)
        raise ValueError("boom")
    assert "3/10" in out.getvalue() and "(stopped)" in out.getvalue()


def test_nested_timer_sections_count_once():
    timer = Timer()
    with timer.section("outer"):
        time.sleep(0.02)
        with timer.section("inner"):
            time.sleep(0.05)
    with timer.section("inner"):
        time.sleep(0.01)
    taken = timer.take()
    assert taken["time/inner"] >= 0.06
    assert 0.02 <= taken["time/outer"] < 0.05
    assert taken["time/outer"] + taken["time/inner"] <= taken["time/step"]
    assert set(timer.take()) == {"time/step"}
