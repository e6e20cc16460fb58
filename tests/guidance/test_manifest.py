"""Numbered manifests: what they list, who writes them, and what is refused."""

import os
import threading
import warnings

import numpy as np
import pytest

from tracekit._core import crc32c
from tracekit.cli import main
from tracekit.errors import DataError
from tracekit.guidance import GuidanceWriter, commit_manifest, latest_manifest, open_dataset


def write(folder, store, name, n=5, **options):
    schema = store.schema()
    with GuidanceWriter(folder, schema, **options) as w:
        rows = store.rows(np.random.default_rng(len(name)), schema, n)
        w.append_batch([name], [np.arange(n + 1)], 0, [n], rows)
    return rows


def test_manifests_are_numbered_list_sealed_segments_and_repeat_nothing(tmp_path, store):
    assert latest_manifest(tmp_path) is None
    rows = write(tmp_path, store, "a")
    first = commit_manifest(tmp_path)
    assert first["number"] == 1 and first["parent"] == 0 and len(first["segments"]) == 1
    assert commit_manifest(tmp_path)["number"] == 1 and (tmp_path / "manifest-000001").exists()
    (segment,) = first["segments"]
    assert segment["trajectories"] == 1 and segment["bytes"] == (tmp_path / segment["name"]).stat().st_size
    write(tmp_path, store, "bb")
    second = commit_manifest(tmp_path)
    assert (second["number"], second["parent"], len(second["segments"])) == (2, 1, 2)
    reader = open_dataset(tmp_path, manifest=True)
    assert reader.manifest == 2 and sorted(reader.ids()) == ["a", "bb"]
    store.check(reader.read_batch(["a"]), rows, slice(None))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_reader_by_manifest_sees_the_same_while_writers_go_on(tmp_path, store):
    write(tmp_path, store, "a", manifest=True)
    reader = open_dataset(tmp_path, manifest=True)
    schema = store.schema()
    w = GuidanceWriter(tmp_path, schema, manifest=True)
    w.append_batch(["b"], [np.arange(4)], 0, [3], store.rows(np.random.default_rng(0), schema, 3))
    assert open_dataset(tmp_path, manifest=True).ids() == ["a"], "what is not sealed is not listed"
    assert sorted(open_dataset(tmp_path).ids()) == ["a", "b"]
    w.close()
    assert reader.ids() == ["a"] and reader.manifest == 1
    reader.refresh()
    assert sorted(reader.ids()) == ["a", "b"] and reader.manifest == 2


def test_a_folder_without_a_manifest_is_opened_by_what_lies_in_it(tmp_path, store):
    write(tmp_path, store, "a")
    reader = open_dataset(tmp_path, manifest=True)
    assert reader.manifest is None and reader.ids() == ["a"]


def test_writers_that_roll_at_once_lose_no_segment(tmp_path, store):
    schema = store.schema()
    rows = store.rows(np.random.default_rng(0), schema, 40)

    def work(k):
        with GuidanceWriter(tmp_path, schema, roll_bytes=1, manifest=True) as w:
            for i in range(12):
                w.append_batch([f"w{k}-{i}"], [np.arange(41)], 0, [40], rows)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    [t.start() for t in threads]
    seen = 0
    while any(t.is_alive() for t in threads):
        if latest_manifest(tmp_path):
            reader = open_dataset(tmp_path, manifest=True)
            assert len(reader) >= seen
            seen = len(reader)
    [t.join() for t in threads]
    final = commit_manifest(tmp_path)
    assert len(final["segments"]) == len(list(tmp_path.glob("*.tkg"))) > 6
    assert len(open_dataset(tmp_path, manifest=True)) == 36
    while final["number"] <= 16:  # one manifest may have listed the segments of several
        with GuidanceWriter(tmp_path, schema, manifest=True) as w:
            w.append_batch([f"more{final['number']}"], [np.arange(41)], 0, [40], rows)
        final = commit_manifest(tmp_path)
    assert len(list(tmp_path.glob("manifest-*"))) <= 16


def test_a_damaged_manifest_is_said_and_the_one_before_is_read(tmp_path, store):
    write(tmp_path, store, "a", manifest=True)
    write(tmp_path, store, "b", manifest=True)
    path = tmp_path / "manifest-000002"
    good = path.read_bytes()
    for bad in (good[:-1], good[:60] + bytes([good[60] ^ 4]) + good[61:], b"", good + b"\0", os.urandom(500)):
        path.write_bytes(bad)
        with pytest.warns(UserWarning, match="manifest-000002 is damaged at byte"):
            assert open_dataset(tmp_path, manifest=True).ids() == ["a"]
    with pytest.warns(UserWarning):
        assert latest_manifest(tmp_path)["number"] == 1
    third = commit_manifest(tmp_path)
    assert (third["number"], third["parent"], len(third["segments"])) == (3, 1, 2), "its number is not used again"
    path.write_bytes(good)
    (tmp_path / "manifest-000009").write_bytes(good)
    with pytest.warns(UserWarning, match="says that it is manifest 2"):
        assert open_dataset(tmp_path, manifest=True).manifest == 3


def test_hostile_manifests_are_refused(tmp_path, store):
    write(tmp_path, store, "a", manifest=True)
    path = tmp_path / "manifest-000001"
    good = path.read_bytes()

    def forge(*changes):
        raw = bytearray(good)
        for at, data in changes:
            raw[at : at + len(data)] = data
        raw[-8:-4] = crc32c(bytes(raw[:-8])).to_bytes(4, "little")
        path.write_bytes(raw)
        return raw

    big = (2**64 - 1).to_bytes(8, "little")
    for change in [(8, b"\2\0"), (12, b"\xff\xff\xff\xff"), (12, b"\2"), (16, bytes(8)), (24, big), (48, b"../")]:
        forge(change)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reader = open_dataset(tmp_path, manifest=True)
        assert reader.manifest is None and "manifest-000001" in str(said[0].message), change
    for at, data in [(80, b"\1\2\3"), (96, big), (96, bytes(8)), (112, b"\7"), (120, b"\7"), (124, b"\7")]:
        forge((at, data))
        with pytest.raises(DataError, match=r"seg-.*is damaged at byte"):
            open_dataset(tmp_path, manifest=True)


def test_a_segment_that_is_gone_or_another_is_named(tmp_path, store):
    write(tmp_path, store, "a", manifest=True)
    (segment,) = tmp_path.glob("*.tkg")
    write(tmp_path / "other", store, "a")
    (other,) = (tmp_path / "other").glob("*.tkg")
    raw = segment.read_bytes()
    segment.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match="not the segment that the manifest lists"):
        open_dataset(tmp_path, manifest=True)
    segment.write_bytes(raw[:-100])
    with pytest.raises(DataError, match=r"seg-.*it has \d+ bytes, its manifest lists"):
        open_dataset(tmp_path, manifest=True)
    segment.unlink()
    with pytest.raises(DataError, match=r"seg-.*is gone, but manifest-000001 lists it"):
        open_dataset(tmp_path, manifest=True)


def test_publish_on_the_command_line(tmp_path, store, capsys):
    write(tmp_path / "a", store, "a")
    assert main(["guidance", "publish", str(tmp_path / "a")]) == 0
    assert main(["guidance", "publish", str(tmp_path / "a"), f"file://{tmp_path}/b"]) == 0
    out = capsys.readouterr().out
    assert "manifest 1 lists 1 segments" in out and "1 uploaded" in out
    assert main(["guidance", "inspect", f"file://{tmp_path}/b"]) == 0
    assert "1 trajectories" in capsys.readouterr().out
