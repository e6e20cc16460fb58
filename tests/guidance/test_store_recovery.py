"""Recovery: the index is rebuilt beside the segment, the segment stays as it is, damage inside is told apart."""

import struct

import numpy as np
import pytest

from tracekit.cli import guidance as cli
from tracekit.errors import DataError
from tracekit.guidance import GuidanceWriter, open_dataset, recover
from tracekit.guidance.pure import PureReader


def killed(tmp_path, store, n=6):
    """A folder as a writer leaves it that dies between two writes."""
    data = store.dataset(tmp_path / "whole", [20] * n, chunk_tokens=8)
    (path,) = (tmp_path / "whole").glob("*.tkg")
    raw = path.read_bytes()
    index = int.from_bytes(raw[-56:-48], "little")
    folder = tmp_path / "killed"
    folder.mkdir()
    left = folder / (path.name + ".open")
    left.write_bytes(raw[:index] + raw[4200:4333])
    return data, left


def args_for(path):
    return type("Args", (), {"dir": str(path)})()


def test_a_torn_tail_is_not_damage(tmp_path, store, capsys):
    data, left = killed(tmp_path, store)
    before = left.read_bytes()
    assert cli.recover(args_for(left.parent)) == 0
    out = capsys.readouterr().out
    assert "6 committed trajectories, index written to" in out and "133 bytes of an unfinished tail ignored" in out
    assert left.read_bytes() == before
    assert (left.parent / (left.name + ".tki")).exists()
    store.check(open_dataset(left.parent).read_batch(data.ids), data.rows, slice(None))
    assert not recover(tmp_path / "whole")[0]["sidecar"]


def test_the_sidecar_is_used_only_for_the_file_it_was_made_from(tmp_path, store):
    data, left = killed(tmp_path, store)
    sidecar = left.parent / (left.name + ".tki")
    recover(left.parent)
    good = sidecar.read_bytes()
    for at in range(0, len(good), 37):
        bad = bytearray(good)
        bad[at] ^= 4
        sidecar.write_bytes(bad)
        store.check(open_dataset(left.parent).read_batch(data.ids), data.rows, slice(None))
    sidecar.write_bytes(good)
    with open(left, "ab") as f:
        f.write(b"more")
    store.check(open_dataset(left.parent).read_batch(data.ids), data.rows, slice(None))


def test_interior_corruption_is_reported_and_the_rest_is_kept(tmp_path, store, capsys):
    data, left = killed(tmp_path, store)
    raw = bytearray(left.read_bytes())
    raw[len(raw) // 2] ^= 1
    left.write_bytes(raw)
    with pytest.warns(UserWarning, match="are damaged"):
        reader = open_dataset(left.parent)
    assert cli.recover(args_for(left.parent)) == 4
    assert "interior corruption: " in capsys.readouterr().out
    kept = 0
    pure = PureReader(left.parent)
    for i, t in enumerate(data.ids):
        rows = slice(20 * i, 20 * i + 20)
        try:
            store.check(reader.read_batch([t]), data.rows, rows)
            np.testing.assert_array_equal(pure.read(t)["layers.0.v"].scales, data.rows["layers.0.v"][1][rows])
            kept += 1
        except DataError:
            pass
    assert kept == 5


def test_a_restarted_writer_opens_a_new_segment(tmp_path, store):
    data, left = killed(tmp_path, store)
    before = left.read_bytes()
    recover(left.parent)
    rows = store.rows(np.random.default_rng(7), data.schema, 4)
    for generation in range(2):
        with GuidanceWriter(left.parent, data.schema) as w:
            w.append_batch(["t0", f"new{generation}"], [np.arange(3)] * 2, 0, [2, 2], rows)
    reader = open_dataset(left.parent)
    assert left.read_bytes() == before
    assert set(reader.ids()) == {*data.ids, "new0", "new1"}
    store.check(reader.read_batch(["t0"]), rows, slice(0, 2))
    store.check(reader.read_batch(["t5"]), data.rows, slice(100, 120))


def test_empty_and_headless_leftovers_do_not_stop_a_dataset(tmp_path, store, capsys):
    """Files that end within their head, and what a power cut leaves: the length without the data, page by page."""
    data, left = killed(tmp_path, store)
    whole = left.read_bytes()
    (length,) = struct.unpack_from("<I", whole, 64)
    first_record = 4096 + -(-length // 8) * 8
    page = (first_record - 1) // 4096 * 4096
    leftovers = [whole[:n] for n in (0, 8, 4095, 4096, 4100, first_record - 1)]
    leftovers += [bytes(n) for n in (4096, 8192, len(whole))] + [whole[:page] + bytes(n) for n in (4096, 1 << 17)]
    for n, content in enumerate(leftovers):
        (left.parent / f"seg-{n:08}-left.tkg.open").write_bytes(content)
    store.check(open_dataset(left.parent).read_batch(data.ids), data.rows, slice(None))
    assert sorted(PureReader(left.parent).ids()) == sorted(data.ids)
    cli.verify(args_for(left.parent))
    assert capsys.readouterr().out.count("unfinished tail") == len(leftovers) + 1
    assert cli.recover(args_for(left.parent)) == 0


def test_a_damaged_head_before_records_is_not_passed_over(tmp_path, store):
    """Zeros in place of a head, records behind: an error names the file, for both readers."""
    data, left = killed(tmp_path, store)
    left.write_bytes(bytes(4096) + left.read_bytes()[4096:])
    with pytest.raises(DataError, match=left.name):
        open_dataset(left.parent)
    with pytest.raises(DataError, match=left.name):
        PureReader(left.parent)
    assert cli.verify(args_for(left.parent)) != 0
