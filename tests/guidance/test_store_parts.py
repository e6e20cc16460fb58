"""Trajectories whose heads several tensor-parallel ranks record, and datasets in sub-folders."""

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset, verify
from tracekit.guidance.pure import PureReader

HEADS, RANKS, LENGTH, PROMPT = 8, 4, 70, 20


def rank_schema(rank, encoding, width=128):
    per = HEADS // RANKS
    share = dict(planes=per, first_plane=rank * per, all_planes=HEADS)
    sites = [SiteSpec(name=f"layers.0.{n}", width=width, encoding=encoding, **share) for n in "kv"]
    if rank == 0:  # what every rank has alike, one of them writes
        sites.append(SiteSpec(name="layers.0.moe_input", width=96))
    return GuidanceSchema(sites=sites)


def write_rank(folder, rank, rows, encoding, *, begun=True, chunk_tokens=16):
    schema = rank_schema(rank, encoding)
    with GuidanceWriter(folder, schema, chunk_tokens=chunk_tokens) as w:
        for name, prefix, first, end in (("prompt", None, 0, PROMPT), ("t", ("prompt", PROMPT), PROMPT, LENGTH)):
            t = w.begin(name, token_ids=np.arange(end + 1), prefix=prefix, part=(rank, RANKS))
            for s in schema.sites:
                heads = slice(s.first_plane, s.first_plane + s.planes)
                codes, scales = (v[first:end, heads] for v in rows[s.name])
                t.append(s.name, first, codes, scales)
            if begun or name == "prompt":
                assert t.commit().result()


def all_rows(seed=0):
    rng = np.random.default_rng(seed)
    rows = {}
    for name, planes, width in (("layers.0.k", HEADS, 128), ("layers.0.v", HEADS, 128), ("layers.0.moe_input", 1, 96)):
        codes = rng.integers(0, 2, (LENGTH, planes, width), dtype=np.uint8)
        rows[name] = codes, (100 + rng.normal(0, 4, (LENGTH, planes, width // 16))).astype(np.uint8)
    return rows


@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("encoding", ["lossless", "compact", "rm15"])
def test_heads_of_four_ranks_are_read_as_one(tmp_path, encoding, chunk_tokens):
    rows = all_rows()
    low = 7 if encoding == "compact" else 3 if encoding == "rm15" else 255
    for rank in (2, 0, 3, 1):
        if rank == 1:
            write_rank(tmp_path, rank, rows, encoding, begun=False, chunk_tokens=chunk_tokens)
            reader = open_dataset(tmp_path)
            assert reader.ids() == ["prompt"] and "t" not in reader
            for incomplete in (reader, PureReader(tmp_path)):
                with pytest.raises(DataError, match="3 of 4 parts"):
                    incomplete["t"] if incomplete is reader else incomplete.find("t")
        write_rank(tmp_path, rank, rows, encoding, chunk_tokens=chunk_tokens)
    reader = open_dataset(tmp_path)
    assert reader.ids() == ["prompt", "t"] and reader.site("layers.0.k").planes == HEADS
    assert not any(f["damage"] for f in verify(tmp_path))
    for tokens in (slice(None), slice(5, 61), slice(30, 31)):
        got = reader["t"].read(tokens=tokens, token_ids=np.arange(LENGTH + 1))
        pure = PureReader(tmp_path).read("t", tokens, token_ids=np.arange(LENGTH + 1))
        for name, (codes, scales) in rows.items():
            keep = low if name != "layers.0.moe_input" else 255
            np.testing.assert_array_equal(got[name].scales, scales[tokens] & keep)
            if encoding != "rm15" or keep == 255:
                np.testing.assert_array_equal(got[name].unpack(), codes[tokens])
            for field in ("codes", "scales", "checks"):
                np.testing.assert_array_equal(getattr(pure[name], field), getattr(got[name], field))
    if encoding == "rm15":
        return
    for heads in (slice(0, 2), slice(3, 7), slice(7, 8), slice(0, 0)):
        batch = reader.read_batch(["t", "prompt"], [10, 0], [60, 20], ["layers.0.v", "layers.0.k"], heads=heads)
        for name, (codes, scales) in rows.items():
            if name in batch:
                at = np.r_[10:60, 0:20]
                np.testing.assert_array_equal(batch[name].codes, codes[at][:, heads])
                np.testing.assert_array_equal(batch[name].scales, scales[at][:, heads] & low)


def test_heads_that_nobody_recorded_are_missing(tmp_path):
    half = dict(planes=2, all_planes=4, width=32)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=[SiteSpec(name="k", first_plane=2, **half)])) as w:
        rows = {"k": (np.ones((3, 2, 32), np.uint8), np.ones((3, 2, 2), np.uint8), None)}
        w.append_batch(["t"], [np.arange(4)], 0, [3], rows)
    reader = open_dataset(tmp_path)
    assert reader.read_batch(["t"], heads=slice(2, 4))["k"].codes.all()
    with pytest.raises(DataError, match=r"site 'k': heads 0\.\.2 are in no part"):
        reader.read_batch(["t"])
    with pytest.raises(DataError, match="heads from 0 on are in no part"):
        PureReader(tmp_path).read("t")


@pytest.mark.parametrize(
    "site, why",
    [
        (dict(planes=2, first_plane=3, all_planes=4), "do not lie in 4"),
        (dict(planes=2, all_planes=4, global_scale=None), "need a static one"),
    ],
)
def test_splits_that_cannot_be_joined_are_refused(tmp_path, site, why):
    with pytest.raises(ValueError, match=why):
        GuidanceWriter(tmp_path, GuidanceSchema(sites=[SiteSpec(name="k", width=32, **site)]))


def test_ranks_with_other_scales_are_not_joined(tmp_path):
    for rank in (0, 1):
        site = SiteSpec(name="k", planes=1, first_plane=rank, all_planes=2, width=32, global_scale=1.0 + rank)
        with GuidanceWriter(tmp_path, GuidanceSchema(sites=[site])) as w:
            t = w.begin("t", token_ids=np.arange(4), part=(rank, 2))
            t.append("k", 0, np.ones((3, 1, 32), np.uint8), np.ones((3, 1, 2), np.uint8))
            t.commit()
    with pytest.raises(DataError, match="site 'k' has other rows in some segments"):
        open_dataset(tmp_path).read_batch(["t"])


def test_segments_in_sub_folders(tmp_path, store):
    data = [store.dataset(tmp_path, [30, 11], seed=i, fan_out=i != 1, schema=store.schema(run=i)) for i in range(2)]
    data.append(store.dataset(tmp_path, [30, 11], seed=2, fan_out=True, roll_bytes=1))
    assert sorted(len(p.relative_to(tmp_path).parts) for p in tmp_path.rglob("*.tkg")) == [1, 2, 2, 2]
    for reader in (open_dataset(tmp_path), PureReader(tmp_path)):
        assert len(reader.segments) == 4 and reader.ids() == ["t0", "t1"]
    store.check(open_dataset(tmp_path).read_batch(["t0", "t1"]), data[-1].rows, slice(None))
    assert len(verify(tmp_path)) == 4
