"""Reading ahead, reading from an event loop, reading while others write, and the byte budget."""

import asyncio
import threading
import time

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceBudget, GuidanceWriter, Microbatch, microbatches, open_dataset


def test_microbatches_come_in_order_and_read_only_so_far_ahead(tmp_path, store):
    data = store.dataset(tmp_path, [10] * 12)
    reader = open_dataset(tmp_path)
    made = []

    def allocate(shape, dtype):
        made.append(shape)
        return np.empty(shape, dtype)

    plan = [Microbatch(data.ids[i : i + 3], token_ids=data.tokens[i : i + 3]) for i in range(0, 12, 3)]
    taken = []

    def steps():
        for m in plan:
            taken.append(m)
            yield m

    for k, (m, records) in enumerate(microbatches(reader, steps(), prefetch=1, allocate=allocate)):
        assert m is plan[k] and len(taken) <= k + 3
        store.check(records, data.rows, slice(30 * k, 30 * k + 30))
    assert k == 3 and len(made) > 4


def test_a_failed_read_is_raised_when_it_is_due_and_ends_the_thread(tmp_path, store):
    data = store.dataset(tmp_path, [10] * 3)
    plan = [Microbatch(["t0"]), Microbatch(["t1"], token_ids=[data.tokens[0]]), Microbatch(["t2"])]
    steps = microbatches(open_dataset(tmp_path), plan)
    assert next(steps)[0] is plan[0]
    with pytest.raises(DataError, match="'t1': tokens 0..10 are not those"):
        next(steps)
    assert not [t for t in threading.enumerate() if t.name.startswith("guidance-prefetch")]


def test_async_reads(tmp_path, store):
    data = store.dataset(tmp_path, [10] * 3)
    reader = open_dataset(tmp_path)

    async def main():
        return await asyncio.gather(*(reader.aread_batch([t]) for t in data.ids))

    for i, got in enumerate(asyncio.run(main())):
        store.check(got, data.rows, slice(10 * i, 10 * i + 10))
    one = asyncio.run(reader["t1"].aread(tokens=slice(2, 5)))
    np.testing.assert_array_equal(one["layers.1.k"].scales, data.rows["layers.1.k"][1][12:15])


def test_readers_open_while_writers_write_and_one_dies(tmp_path, store):
    schema = store.schema()
    rows = store.rows(np.random.default_rng(0), schema, 5)
    stop, errors = threading.Event(), []

    def write(k):
        w = GuidanceWriter(tmp_path, schema, chunk_tokens=2, roll_bytes=30_000)
        i = 0
        while not stop.is_set():
            w.append_batch([f"w{k}-{i}"], [np.arange(6)], 0, [5], rows)
            i += 1
        if k:
            w.close()  # the other one just ends, unsealed

    threads = [threading.Thread(target=write, args=(k,)) for k in range(2)]
    [t.start() for t in threads]
    seen = 0
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        try:
            reader = open_dataset(tmp_path)
        except DataError as e:
            assert "no guidance segments" in str(e)
            continue
        ids = reader.ids()
        assert len(ids) >= seen
        seen = len(ids)
        for t in ids[:: max(len(ids) // 5, 1)]:
            store.check(reader.read_batch([t], token_ids=[np.arange(6)]), rows, slice(None))
    stop.set()
    [t.join() for t in threads]
    assert seen > 20 and not errors
    assert len(open_dataset(tmp_path)) >= seen


def test_budget_deletes_only_what_is_released_and_makes_producers_wait(tmp_path, store):
    budget = GuidanceBudget(tmp_path, byte_budget=60_000)
    for step in range(3):
        budget.retain(f"step{step}")
        store.dataset(tmp_path / f"step{step}", [40])
    budget.retain("step0")
    used = budget.usage()
    room = 60_000 - used
    budget.wait_room(room)
    with pytest.raises(DataError, match="no step was released in 0.05 s"):
        budget.wait_room(room + 1, timeout=0.05)
    with pytest.raises(DataError, match="never fit"):
        budget.wait_room(60_001)
    assert not budget.release("step0")
    waited = []
    producer = threading.Thread(target=lambda: (budget.wait_room(room + 1), waited.append(time.monotonic())))
    producer.start()
    time.sleep(0.1)
    assert not waited and (tmp_path / "step0").exists()
    released = time.monotonic()
    assert budget.release("step0")
    producer.join(5)
    assert waited and waited[0] >= released and not (tmp_path / "step0").exists()
    assert (tmp_path / "step1").exists()
    with pytest.raises(DataError, match="was not retained"):
        budget.release("step0")
