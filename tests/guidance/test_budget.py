"""The byte budget in a training loop: nothing that a resumed run would need is ever deleted."""

import os
import shutil
import threading
import time

import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceBudget, open_dataset


def step(budget, store, n, size=40):
    budget.retain(f"step{n}")
    return store.dataset(budget.root / f"step{n}", [size])


def test_folders_live_until_a_checkpoint_after_their_last_reader(tmp_path, store):
    budget = GuidanceBudget(tmp_path)
    for n in range(3):
        step(budget, store, n)
    budget.retain("step1")  # step 2 reads it once more
    budget.consumed(0, "step0")
    budget.consumed(1, ["step1"])
    assert sorted(os.listdir(tmp_path)) == ["step0", "step1", "step2"], "consumed is not enough"
    assert budget.checkpointed(0) == ["step0"]
    assert budget.checkpointed(1) == [] and (tmp_path / "step1").exists()
    budget.consumed(2, ["step1", "step2"])
    assert budget.checkpointed(1) == [], "an older checkpoint does not hold step 2"
    assert sorted(budget.checkpointed(5)) == ["step1", "step2"]
    assert os.listdir(tmp_path) == []
    assert budget.checkpointed(9) == []


def test_consuming_what_was_not_retained_is_an_error(tmp_path, store):
    budget = GuidanceBudget(tmp_path)
    step(budget, store, 0)
    with pytest.raises(DataError, match="'step9' was not retained for step 1"):
        budget.consumed(1, "step9")
    budget.consumed(1, "step0")
    with pytest.raises(DataError, match="was not retained"):
        budget.consumed(2, "step0")
    assert budget.checkpointed(1) == ["step0"]


def test_a_producer_waits_for_the_checkpoint_and_the_loop_is_told(tmp_path, store):
    budget = GuidanceBudget(tmp_path, byte_budget=1)
    step(budget, store, 0)
    size = budget.usage()
    budget.byte_budget = size + size // 2
    budget.consumed(0, "step0")
    assert not budget.wants_checkpoint
    with pytest.raises(DataError, match="1 folders wait for a checkpoint"):
        budget.wait_room(size, timeout=0.05)
    done = []
    producer = threading.Thread(target=lambda: (budget.wait_room(size), done.append(True)))
    producer.start()
    until = time.monotonic() + 5
    while not budget.wants_checkpoint and time.monotonic() < until:
        time.sleep(0.01)
    assert budget.wants_checkpoint and not done and (tmp_path / "step0").exists()
    budget.checkpointed(0)
    producer.join(5)
    assert done and not budget.wants_checkpoint


def test_a_folder_that_cannot_be_deleted_is_kept_and_tried_again(tmp_path, store, monkeypatch):
    budget = GuidanceBudget(tmp_path)
    data = step(budget, store, 0)
    budget.consumed(0, "step0")

    def refuse(*_):
        raise PermissionError("read-only")

    with monkeypatch.context() as m:
        m.setattr(os, "rename", refuse)
        with pytest.raises(PermissionError):
            budget.checkpointed(0)
    store.check(open_dataset(tmp_path / "step0").read_batch(data.ids), data.rows, slice(None))
    assert budget.checkpointed(0) == ["step0"]


def test_a_restarted_process_finds_all_since_its_last_checkpoint(tmp_path, store):
    first = GuidanceBudget(tmp_path)
    for n in range(3):
        step(first, store, n)
        first.consumed(n, f"step{n}")
    first.checkpointed(0)  # and the process dies after step 2
    again = GuidanceBudget(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step1", "step2"]
    for n in (1, 2):
        again.retain(f"step{n}")
        again.consumed(n, f"step{n}")
    assert again.checkpointed(2) == ["step1", "step2"]


def test_what_is_kept_beyond_its_use_gives_way_oldest_first(tmp_path, store):
    budget = GuidanceBudget(tmp_path)
    for n in range(4):
        step(budget, store, n)
        budget.consumed(n, f"step{n}")
    assert budget.checkpointed(3, keep=2) == ["step0", "step1"]
    size = budget.usage() // 2
    budget.byte_budget = 3 * size
    budget.expect(size)
    assert not budget.wants_checkpoint and budget.checkpointed(3, keep=-1) == []
    budget.expect(2 * size)
    assert not budget.wants_checkpoint, "no checkpoint makes room: what lies there is safe already"
    budget.wait_room(2 * size, timeout=0)
    assert os.listdir(tmp_path) == ["step3"]
    step(budget, store, 4)
    budget.consumed(4, "step4")
    assert budget.wants_checkpoint
    with pytest.raises(DataError, match="1 folders wait for a checkpoint"):
        budget.wait_room(3 * size, timeout=0)
    budget.expect(3 * size)
    assert budget.checkpointed(4, keep=2) == ["step4"] and not budget.wants_checkpoint


def test_keep_beyond_what_is_due_deletes_nothing(tmp_path, store):
    budget = GuidanceBudget(tmp_path)
    for n in range(3):
        step(budget, store, n)
        budget.consumed(n, f"step{n}")
    for keep in (5, 4, 3, -1):
        assert budget.checkpointed(2, keep=keep) == []
    assert budget.checkpointed(2, keep=2) == ["step0"]


def test_a_folder_that_somebody_deleted_is_given_back_all_the_same(tmp_path, store):
    budget = GuidanceBudget(tmp_path)
    for n in range(2):
        step(budget, store, n)
        budget.consumed(n, f"step{n}")
    shutil.rmtree(tmp_path / "step0")
    assert budget.checkpointed(1) == ["step0", "step1"] and os.listdir(tmp_path) == []
    budget.retain("step0")
