"""Writing past the page cache, and by io_uring."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from tracekit.guidance import GuidanceWriter, open_dataset, recover, verify


def write(folder, store, io, lengths=(3, 700, 1, 40)):
    schema = store.schema()
    rows = [store.rows(np.random.default_rng(i), schema, n) for i, n in enumerate(lengths)]
    w = GuidanceWriter(folder, schema, io=io, roll_bytes=30_000)
    for i, (n, r) in enumerate(zip(lengths, rows, strict=True)):
        t = w.begin(f"t{i}", token_ids=np.arange(n + 1))
        for s in schema.sites:
            t.append(s.name, 0, *r[s.name])
        assert t.commit().result()
        # Committed: readable, although the file's last block is not full.
        store.check(open_dataset(folder).read_batch([f"t{i}"], token_ids=[np.arange(n + 1)]), r, slice(None))
    return w, rows


@pytest.mark.parametrize("io", ["direct", "uring"])
def test_every_mode_gives_the_same_dataset(tmp_path, store, io):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        w, rows = write(tmp_path, store, io)
        assert all(not r["interior"] for r in recover(tmp_path))
        stats = w.close()
    assert stats["segments"] > 1
    # Some file systems have no direct writes, some builds and kernels no io_uring; then the writer says so.
    assert (stats["as_asked"] == stats["segments"]) != any("takes no " in str(t.message) for t in told)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.tkg")) == stats["bytes"]
    assert not any(f["damage"] for f in verify(tmp_path))
    for i, r in enumerate(rows):
        store.check(open_dataset(tmp_path).read_batch([f"t{i}"]), r, slice(None))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs tmpfs")
def test_a_file_system_without_direct_writes_is_reported(store):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        w, rows = write(folder, store, "direct")
        with pytest.warns(UserWarning, match="takes no direct writes"):
            assert w.close()["as_asked"] == 0
        store.check(open_dataset(folder).read_batch(["t1"]), rows[1], slice(None))


def test_an_unknown_mode_is_refused(tmp_path, store):
    with pytest.raises(ValueError, match="io 'odirect'"):
        GuidanceWriter(tmp_path, store.schema(), io="odirect")
