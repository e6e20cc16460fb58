"""What the SGLang plugin keeps on the host: rows by KV slot, found and gathered."""

import weakref

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.rollout.sglang import stopwatch
from tracekit.rollout.sglang.capture import Column, split
from tracekit.rollout.sglang.stopwatch import Stopwatch, busy_share
from tracekit.rollout.sglang.store import SlotStore


def test_rows_are_the_last_of_their_slots_and_memory_does_not_grow():
    rng, slots, width = np.random.default_rng(0), 40, 7
    store, last = SlotStore(slots, width), {}
    for version in range(200):
        some = rng.integers(0, slots, rng.integers(1, 12))  # with duplicates, as padding has
        rows = rng.integers(0, 256, (len(some), width), dtype=np.uint8)
        store.put(some, rows, version)
        last |= {int(slot): (row, version) for slot, row in zip(some, rows, strict=True)}
        asked = rng.permutation(list(last))
        found, versions = store.find(asked).result()
        np.testing.assert_array_equal(found, [last[int(s)][0] for s in asked])
        assert versions.tolist() == [last[int(s)][1] for s in asked]
        assert store.bytes == slots * width
    store.close()


def test_what_was_found_outlives_its_slots():
    store = SlotStore(4, 2)
    store.put(np.arange(4), np.full((4, 2), 1, np.uint8), 1)
    early = store.find(np.arange(3))
    store.put(np.arange(4), np.full((4, 2), 2, np.uint8), 2)
    late = store.find(np.arange(4)).behind(early)
    again = store.find(np.arange(2)).behind(late)  # pushed out twice
    assert early.result()[0].tolist() == [[1, 1]] * 3
    rows, versions = late.result()
    assert rows.tolist() == [[1, 1]] * 3 + [[2, 2]] and versions.tolist() == [1, 1, 1, 2]
    assert again.result()[0].tolist() == [[1, 1]] * 2
    assert store.find(np.arange(4)).behind(None).result()[1].tolist() == [2] * 4


def test_a_slot_that_nothing_filled_is_an_error_of_that_request():
    store = SlotStore(4, 2)
    store.put(np.array([1]), np.zeros((1, 2), np.uint8), 0)
    with pytest.raises(KeyError):
        store.find(np.array([1, 3])).result()
    assert store.find(np.array([1])).result()[0].tolist() == [[0, 0]]


def test_rows_that_do_not_fit_stop_the_engine_at_the_next_forward():
    store = SlotStore(4, 2)
    store.put(np.array([9]), np.zeros((1, 2), np.uint8), 0)
    store.find(np.array([], np.int64)).result()  # the thread has come this far, and goes on
    with pytest.raises(RuntimeError, match="slot 9 is outside"):
        store.put(np.array([1]), np.zeros((1, 2), np.uint8), 0)


def test_rows_are_let_go_of():
    """Pinned memory must go back to its allocator: at most what waits is held."""
    store, alive = SlotStore(4, 2), []

    class Rows(np.ndarray):
        pass

    for i in range(50):
        rows = np.full((1, 2), i, np.uint8).view(Rows)
        alive.append(weakref.ref(rows))
        store.put(np.array([i % 4]), rows, i)
        del rows
        store.find(np.array([i % 4])).result()  # the thread is done with it
    store.find(np.array([0]))
    assert sum(ref() is not None for ref in alive) == 0


def test_many_forwards_and_requests_in_order(monkeypatch):
    """The queue fills up on the way, which holds the caller back and loses nothing."""
    monkeypatch.setattr(SlotStore, "WAITING", 2)
    store, found = SlotStore(64, 4096), []
    for i in range(500):
        store.put(np.arange(64), np.full((64, 4096), i % 256, np.uint8), i)
        found.append(store.find(np.arange(0, 64, 9)))
    for i, one in enumerate(found):
        rows, versions = one.result()
        assert (rows == i % 256).all() and (versions == i).all()
    store.close()
    with pytest.raises(DataError, match="closed"):
        store.find(np.arange(2))


def test_rows_come_apart_into_their_columns():
    columns = {"a": Column((2, 3), np.dtype(np.uint8)), "b": Column((2,), np.dtype("<f4"))}
    a = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    b = np.linspace(0, 1, 8, dtype="<f4").reshape(4, 2)
    rows = np.concatenate([a.reshape(4, -1), b.view(np.uint8).reshape(4, -1)], 1)
    got = split(rows, columns)
    np.testing.assert_array_equal(got["a"], a)
    np.testing.assert_array_equal(got["b"], b)


def test_the_stopwatch_tells_the_share_of_the_time(tmp_path, monkeypatch):
    assert Stopwatch.from_environment() is None
    monkeypatch.setenv(stopwatch.VARIABLE, str(tmp_path / "times"))
    monkeypatch.setattr(stopwatch, "EVERY", 0.0)
    now = iter(range(100))
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(now)))
    watch = Stopwatch.from_environment()
    work = watch.wrap(lambda x: x + 1, forward=True)
    assert [work(i) for i in range(4)] == [1, 2, 3, 4]  # from 0 to 1, from 2 to 3, ...
    assert watch.forwards == 4 and busy_share(tmp_path / "times", 1, 7) == 0.5
    with pytest.raises(ValueError, match="1 lines"):
        busy_share(tmp_path / "times", 0, 2)
