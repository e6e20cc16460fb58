"""What is written comes back, whatever the sizes, the order and the way of writing."""

import pickle

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, open_dataset
from tracekit.guidance.bits import pack_rows


@pytest.mark.parametrize("chunk_tokens", [1, 7, 256])
@pytest.mark.parametrize("lengths", [[1], [10, 3, 700, 1], [0, 5]])
def test_batches_round_trip(tmp_path, store, lengths, chunk_tokens):
    data = store.dataset(tmp_path, lengths, chunk_tokens=chunk_tokens)
    reader = open_dataset(tmp_path)
    store.check(reader.read_batch(data.ids, token_ids=data.tokens), data.rows, slice(None))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for i in reversed(range(len(lengths))):
        a, b = lengths[i] // 3, lengths[i] - lengths[i] // 4
        got = reader.read_batch([data.ids[i]] * 2, [a, a], [b, b])
        rows = np.r_[starts[i] + a : starts[i] + b]
        store.check(got, data.rows, np.concatenate([rows, rows]))


def test_large_chunks_are_read_by_plane(tmp_path, store):
    data = store.dataset(tmp_path, [900], chunk_tokens=512)
    reader = open_dataset(tmp_path)
    got = reader["t0"].read(slice(500, 530), sites=["layers.0.k"], heads=slice(1, 3))["layers.0.k"]
    codes, scales, _ = data.rows["layers.0.k"]
    np.testing.assert_array_equal(got.unpack(), codes[500:530, 1:3])
    np.testing.assert_array_equal(got.codes, pack_rows(codes[500:530, 1:3], 2))
    np.testing.assert_array_equal(got.scales, scales[500:530, 1:3])
    assert got.global_scale == 1.0 and got.token_scale is None and got.tokens == range(500, 530)


@pytest.mark.parametrize("packed", [False, True])
def test_appends_interleave_over_trajectories_and_sites(tmp_path, store, packed):
    rng = np.random.default_rng(1)
    schema = store.schema()
    lengths = [40, 23, 64]
    rows = [store.rows(rng, schema, n) for n in lengths]
    with GuidanceWriter(tmp_path, schema, chunk_tokens=16) as w:
        open_ = [w.begin(f"x{i}", token_ids=np.arange(n + 1), policy_version=i) for i, n in enumerate(lengths)]
        for step in range(0, 64, 9):
            for t, n, r in zip(open_, lengths, rows, strict=True):
                for site in schema.sites:
                    codes, scales, token_scale = (
                        None if v is None else v[step : min(step + 9, n)] for v in r[site.name]
                    )
                    if codes is not None and packed:
                        codes = pack_rows(codes, site.bits)
                    if len(scales):
                        t.append(site.name, step, codes, scales, token_scale, packed=packed)
        for i in (2, 0, 1):
            open_[i].commit(extra={"reward": i})
    reader = open_dataset(tmp_path)
    for i, r in enumerate(rows):
        store.check(reader.read_batch([f"x{i}"]), r, slice(None))
        assert reader[f"x{i}"].extra == {"reward": i} and reader[f"x{i}"].policy_version == (i, i)


def test_a_sibling_reads_its_prompt_from_the_prefix(tmp_path, store):
    rng = np.random.default_rng(2)
    schema = store.schema()
    prompt, tails = rng.integers(0, 99, 12), [rng.integers(0, 99, n) for n in (6, 1, 9)]
    lengths = [12] + [len(t) - 1 for t in tails]
    rows = store.rows(rng, schema, sum(lengths))
    tokens = [prompt] + [np.concatenate([prompt, t]) for t in tails]
    prefixes = [None] + [("g", 12)] * 3
    with GuidanceWriter(tmp_path, schema, chunk_tokens=8) as w:
        w.append_batch(["g", "a", "b", "c"], tokens, [0, 12, 12, 12], lengths, rows, 5, prefixes)
    reader = open_dataset(tmp_path)
    # rows: prompt 0..12, a 12..17, b none, c 17..25
    got = reader.read_batch(["c"], [8], [18], token_ids=[tokens[3]])
    store.check(got, rows, np.r_[8:12, 17:23])
    store.check(reader.read_batch(["b"], [0], [12]), rows, slice(0, 12))
    assert reader["c"].prefix == ("g", 12) and reader.lengths(["b", "c"]).tolist() == [12, 20]
    wrong = tokens[3].copy()
    wrong[3] += 1
    with pytest.raises(DataError, match="trajectory 'g': tokens 0..8 are not those"):
        reader.read_batch(["c"], token_ids=[wrong])


def test_static_scales_that_differ_between_segments_come_per_token(tmp_path, store):
    from dataclasses import replace

    a = store.schema()
    b = replace(a, sites=[replace(s, global_scale=s.global_scale and 2.5) for s in a.sites])
    store.dataset(tmp_path, [3], schema=a)
    rows = store.rows(np.random.default_rng(5), b, 2)
    with GuidanceWriter(tmp_path, b) as w:
        w.append_batch(["u"], [np.arange(3)], 0, [2], rows)
    got = open_dataset(tmp_path).read_batch(["t0", "u"], sites=["layers.0.moe_input"])["layers.0.moe_input"]
    assert got.token_scale.tolist() == [448.0] * 3 + [2.5] * 2


def test_parts_of_ranks_make_a_trajectory(tmp_path, store):
    from dataclasses import replace

    whole = store.schema()
    rng = np.random.default_rng(9)
    rows = store.rows(rng, whole, 5)
    for part, sites in enumerate((whole.sites[:2], whole.sites[2:])):
        w = GuidanceWriter(tmp_path, replace(whole, sites=sites))
        t = w.begin("t", token_ids=np.arange(6), part=(part, 2))
        for s in sites:
            t.append(s.name, 0, *rows[s.name])
        if part == 1:
            with pytest.raises(DataError, match="has 1 of 2 parts"):
                open_dataset(tmp_path).read_batch(["t"])
        t.commit()
        w.close()
    store.check(open_dataset(tmp_path).read_batch(["t"]), rows, slice(None))


def test_out_arrays_are_written_in_place(tmp_path, store):
    data = store.dataset(tmp_path, [10, 4])
    name = "layers.1.moe_input"
    codes, scales = np.zeros((14, 1, 96), np.uint8), np.zeros((14, 1, 6), np.uint8)
    open_dataset(tmp_path).read_batch(data.ids, sites=[name], out={name: (codes, scales, None)})
    np.testing.assert_array_equal(codes, data.rows[name][0])
    with pytest.raises(ValueError, match="wrong size"):
        open_dataset(tmp_path).read_batch(data.ids, sites=[name], out={name: (codes[1:], scales, None)})


def test_segments_roll_over_and_read_as_one(tmp_path, store):
    data = store.dataset(tmp_path, [50] * 40, roll_bytes=20_000)
    assert len(list(tmp_path.glob("*.tkg"))) > 3 and not list(tmp_path.glob("*.open"))
    store.check(open_dataset(tmp_path).read_batch(data.ids), data.rows, slice(None))


@pytest.mark.parametrize("encoding", ["lossless", "compact", "rm15"])
def test_a_mapped_dataset_reads_the_same_bytes(tmp_path, store, encoding):
    data = store.dataset(tmp_path, [300, 1, 40], schema=store.wide_schema(), encoding=encoding, chunk_tokens=64)
    plain, mapped = open_dataset(tmp_path), open_dataset(tmp_path, mmap=True)
    again = pickle.loads(pickle.dumps(mapped))
    for reader in (mapped, again):
        assert reader.mmap
        for starts, stops in ((0, data.lengths), ([17, 0, 3], [170, 1, 40])):
            want = plain.read_batch(data.ids, starts, stops, token_ids=data.tokens)
            got = reader.read_batch(data.ids, starts, stops, token_ids=data.tokens)
            for name, record in want.items():
                for a, b in zip((*record, record.checks), (*got[name], got[name].checks), strict=True):
                    assert (a is None and b is None) or np.array_equal(a, b)


def test_a_mapped_dataset_notices_a_flipped_bit(tmp_path, store):
    data = store.dataset(tmp_path, [40], schema=store.wide_schema())
    (path,) = tmp_path.glob("*.tkg")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        open_dataset(tmp_path, mmap=True).read_batch(data.ids)


def test_metadata_with_keys_of_any_kind_comes_back(tmp_path, store):
    user = {1: "a", "b": {2: [float("inf"), b"raw"]}}
    schema = store.schema()
    schema = GuidanceSchema(sites=schema.sites, user=user)
    with GuidanceWriter(tmp_path, schema) as w:
        t = w.begin("t", token_ids=np.arange(2))
        for name, (codes, scales, token_scale) in store.rows(np.random.default_rng(0), schema, 1).items():
            t.append(name, 0, codes, scales, token_scale)
        t.commit(extra={3: "c"})
    reader = open_dataset(tmp_path)
    assert reader.segments[0]["schema"].user == user and reader["t"].extra == {3: "c"}
