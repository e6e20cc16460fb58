"""Tensors into the writer: without a copy from the CPU, through a pinned ring from a GPU."""

import threading

import numpy as np
import pytest
import torch

from tracekit.errors import DataError
from tracekit.guidance import (
    DeviceWriter,
    GuidanceSchema,
    GuidanceWriter,
    Microbatch,
    SiteSpec,
    microbatches,
    open_dataset,
)
from tracekit.guidance.cuda_writer import PinnedRing
from tracekit.guidance.writer import _u8

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class OnlyDlpack:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OnTheGpu(OnlyDlpack):
    def __dlpack_device__(self):
        return 2, 0


def test_cpu_tensors_buffers_and_dlpack_are_not_copied():
    t = torch.arange(64, dtype=torch.uint8).reshape(2, 32)
    for x in (t, OnlyDlpack(t), t.numpy(), memoryview(t.numpy()), bytearray(64)):
        assert np.shares_memory(_u8(x), np.asarray(t if isinstance(x, OnlyDlpack) else x))
    with pytest.raises(ValueError, match="DeviceWriter"):
        _u8(OnTheGpu(t))


def test_a_ring_lends_disjoint_pieces_and_waits_for_room():
    ring = PinnedRing(100, pinned=False)
    rng = np.random.default_rng(0)
    lent = []
    for n in rng.integers(1, 60, 500).tolist():
        while ring._place(n) is None:
            ring.give()
            lent.pop(0)
        at = ring.take(n).storage_offset()
        assert at + n <= 100 and all(at + n <= a or b <= at for a, b in lent)
        lent.append((at, at + n))
    while ring._place(30) is not None:
        ring.take(30)
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(ring.take(30)))
    waiter.start()
    waiter.join(0.05)
    assert not taken
    while not taken:
        ring.give()
        waiter.join(0.05)
    with pytest.raises(ValueError, match="raise ring_bytes"):
        ring.take(101)


def rows_of(store, device, schema, lengths):
    rows = [store.rows(np.random.default_rng(i), schema, n) for i, n in enumerate(lengths)]

    def tensors(row):
        return [None if x is None else torch.tensor(x, device=device) for x in row]

    return rows, [{name: tensors(row) for name, row in r.items()} for r in rows]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_a_device_are_written_behind(tmp_path, store, device):
    schema = store.schema()
    lengths = [30, 300, 1]
    rows, tensors = rows_of(store, device, schema, lengths)
    with GuidanceWriter(tmp_path, schema) as w:
        with DeviceWriter(w, device=device, ring_bytes=40_000) as d:
            commits = []
            for i, (n, r) in enumerate(zip(lengths, tensors, strict=True)):
                t = w.begin(f"t{i}", token_ids=np.arange(n + 1))
                for s in schema.sites:
                    for a in range(0, n, 100):
                        part = [None if x is None else x[a : a + 100] for x in r[s.name]]
                        last = d.append(t, s.name, a, *part)
                commits.append(d.commit(t))
            d.flush()
            assert last.done() and last.result() is None and all(c.result(0) for c in commits)
        assert [d._ring._lent, d._thread] == [type(d._ring._lent)(), None]
    reader = open_dataset(tmp_path)
    for i, r in enumerate(rows):
        store.check(reader.read_batch([f"t{i}"]), r, slice(None))


def test_an_error_of_the_writing_thread_reaches_its_future_and_every_later_call(tmp_path):
    schema = GuidanceSchema(sites=[SiteSpec(name="x", width=64)])
    codes, scales = torch.ones(4, 64, dtype=torch.uint8), torch.ones(4, 4, dtype=torch.uint8)
    with GuidanceWriter(tmp_path, schema) as w:
        d = DeviceWriter(w, device="cpu")
        t = w.begin("t", token_ids=np.arange(20))
        assert d.append(t, "x", 0, codes, scales).result(5) is None
        failed = d.append(t, "x", 9, codes, scales)
        with pytest.raises(ValueError, match="token 4 is next"):
            failed.result(5)
        for call in (lambda: d.append(t, "x", 4, codes, scales), lambda: d.commit(t), d.flush, d.close):
            with pytest.raises(DataError, match="token 4 is next"):
                call()
        with pytest.raises(DataError, match="is closed"):
            d.append(t, "x", 4, codes, scales)


@needs_cuda
def test_the_side_stream_waits_for_the_stream_that_makes_the_tensors(tmp_path):
    schema = GuidanceSchema(sites=[SiteSpec(name="x", width=4096)])
    with GuidanceWriter(tmp_path, schema) as w, DeviceWriter(w) as d:
        t = w.begin("t", token_ids=np.arange(513))
        torch.cuda._sleep(200_000_000)
        codes = torch.ones(512, 4096, dtype=torch.uint8, device="cuda") * 1
        future = d.append(t, "x", 0, codes, torch.full((512, 256), 100, dtype=torch.uint8, device="cuda"))
        assert not future.done()
        del codes
        torch.zeros(512, 4096, dtype=torch.uint8, device="cuda")
        assert d.commit(t).result(30)
    assert open_dataset(tmp_path).read_batch(["t"])["x"].codes.all()


@needs_cuda
def test_prefetch_into_pinned_memory(tmp_path, store):
    data = store.dataset(tmp_path, [10] * 3)
    steps = microbatches(open_dataset(tmp_path), [Microbatch([t]) for t in data.ids], pin_memory=True)
    for k, (_, records) in enumerate(steps):
        assert all(torch.from_numpy(r.scales).is_pinned() for r in records.values())
        store.check(records, data.rows, slice(10 * k, 10 * k + 10))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinned_memory_needs_a_device(tmp_path, store):
    data = store.dataset(tmp_path, [10])
    with pytest.raises(DataError, match="needs a CUDA device"):
        next(microbatches(open_dataset(tmp_path), [Microbatch(data.ids)], pin_memory=True))
