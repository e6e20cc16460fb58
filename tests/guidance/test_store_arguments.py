"""What a caller gets wrong is refused, never written as something else; what holds a byte is taken for that byte."""

import os

import numpy as np
import pytest
import torch

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, Microbatch, SiteSpec, microbatches, open_dataset

SCHEMA = GuidanceSchema(sites=[SiteSpec(name="a", width=32)])
CODES = np.random.default_rng(0).integers(0, 2, (5, 32), dtype=np.uint8)
SCALES = np.random.default_rng(1).integers(0, 127, (5, 2), dtype=np.uint8)


@pytest.mark.parametrize(
    ("codes", "scales", "why"),
    [
        (CODES, SCALES.astype(np.int64) + 300, r"site 'a': scales has values from \d+ to \d+: pass uint8"),
        (CODES, SCALES.astype(np.int8) - np.int8(127), "scales has values from -"),
        (CODES, SCALES / 3, "scales has elements of float64"),
        (CODES * np.nan, SCALES, "codes has elements of float64"),
        (CODES, torch.zeros(5, 2), "scales has elements of float32"),
        (CODES, torch.zeros(5, 2, dtype=torch.bfloat16), "rows cannot be read"),
        (CODES.T.copy(), SCALES, r"codes has shape \[32, 5\], 5 tokens of 1 x 32 are needed"),
        (CODES.reshape(5, 8, 4), SCALES, r"codes has shape \[5, 8, 4\]"),
    ],
)
def test_rows_are_never_cut_or_turned(tmp_path, codes, scales, why):
    with GuidanceWriter(tmp_path, SCHEMA) as w:
        t = w.begin("t", token_ids=np.arange(6))
        with pytest.raises(ValueError, match=why):
            t.append("a", 0, codes, scales)
        with pytest.raises(ValueError, match=why):
            w.append_batch(["b"], [np.arange(6)], 0, [5], {"a": (codes, scales, None)})
        t.append("a", 0, CODES, SCALES)
        t.commit()
    np.testing.assert_array_equal(open_dataset(tmp_path)["t"].read()["a"].scales[:, 0], SCALES)


@pytest.mark.parametrize(
    "scales",
    [
        torch.from_numpy(SCALES).view(torch.float8_e4m3fn),
        torch.from_numpy(SCALES).view(torch.float8_e4m3fn)[:, None],
        SCALES.astype(np.int32),
        SCALES.tolist(),
    ],
)
def test_scales_of_other_types_are_their_bytes(tmp_path, scales):
    with GuidanceWriter(tmp_path, SCHEMA) as w:
        t = w.begin("t", token_ids=torch.arange(6))
        t.append("a", 0, CODES.astype(bool), scales)
        t.commit()
    got = open_dataset(tmp_path)["t"].read(token_ids=list(range(6)))["a"]
    np.testing.assert_array_equal(got.scales[:, 0], SCALES)
    np.testing.assert_array_equal(got.unpack()[:, 0], CODES)


def test_numbers_out_of_range_are_named(tmp_path):
    with GuidanceWriter(tmp_path, SCHEMA) as w:
        with pytest.raises(ValueError, match="token_ids has elements of float64"):
            w.begin("t", token_ids=np.arange(6) / 2)
        t = w.begin("t", token_ids=np.arange(6))
        for tok0 in (-1, 1 << 32):
            with pytest.raises(ValueError, match=f"'t', site 'a': rows start at token {tok0}"):
                t.append("a", tok0, CODES, SCALES)
        t.append("a", 0, CODES, SCALES)
        assert t.commit().result(timeout=1e19)
    r = open_dataset(tmp_path)
    for n in (6, 1 << 31, 10**15, 1 << 70):  # no memory is asked for before the range is looked at
        with pytest.raises(DataError, match=f"0..5, 0..{n} was asked for"):
            r["t"].read(slice(0, n))
    with pytest.raises(ValueError, match=r"-1\.\.3"):
        r.read_batch(["t"], -1, 3)
    with pytest.raises(ValueError, match=r"5\.\.3"):
        r.read_batch(["t"], 5, 3)
    for wrong in ({"sites": "a"}, {"tokens": 3}):
        with pytest.raises(ValueError, match=r"lists of names|use a slice"):
            r["t"].read(**wrong)
    with pytest.raises(ValueError, match="prefetch is -1"):
        next(microbatches(r, [Microbatch(["t"])], prefetch=-1))


def test_a_folder_with_other_rows_of_a_site_says_so(tmp_path):
    for width in (32, 64):
        with GuidanceWriter(tmp_path, GuidanceSchema(sites=[SiteSpec(name="a", width=width)])) as w:
            rows = (np.zeros((2, width), np.uint8), np.zeros((2, width // 16), np.uint8), None)
            w.append_batch([f"t{width}"], [np.arange(3)], 0, [2], {"a": rows})
    with pytest.raises(DataError, match="site 'a' has other rows in some segments"):
        open_dataset(tmp_path)["t64"].read()


def test_close_never_hides_a_failure(tmp_path):
    w = GuidanceWriter(tmp_path / "x", SCHEMA)
    (tmp_path / "x").rmdir()
    with pytest.raises(DataError, match="cannot create"):
        t = w.begin("t", token_ids=np.arange(6))
        t.append("a", 0, CODES, SCALES)
        t.commit().result()
    for _ in range(3):
        with pytest.raises(DataError, match="the guidance writer failed"):
            w.close()


def test_paths_may_be_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with GuidanceWriter(b"run", SCHEMA) as w:
        w.begin("t", token_ids=[1]).commit()
    assert open_dataset(b"run").ids() == ["t"] and os.listdir() == ["run"]
    with pytest.raises(TypeError):
        GuidanceWriter(None, SCHEMA)


def test_a_schema_that_cannot_be_written_is_refused_at_once(tmp_path):
    for schema, why in (
        (GuidanceSchema(sites=SCHEMA.sites, user={"a": "x" * (1 << 20)}), "at most 1 MiB"),
        (GuidanceSchema(sites=[SiteSpec(name="a", width=8, block=0)]), "'a': block is 0"),
        (GuidanceSchema(sites=[SiteSpec(name="a", width=8, block=0, encoding="compact")]), "'a': block is 0"),
        (
            GuidanceSchema(sites=[SiteSpec(name="a", width=2048, profile="nvfp4-4over6", encoding="low2")]),
            "'a': low2 cannot hold nvfp4-4over6: its scale rule has two branches\nuse lossless",
        ),
        (
            GuidanceSchema(sites=[SiteSpec(name="a", width=2048, profile="mine", encoding="compact")]),
            "'a': compact cannot hold mine: tracekit does not know that profile",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            GuidanceWriter(tmp_path / "run", schema)
    assert not (tmp_path / "run").exists()
    for profile in ("nvfp4-4over6", "mine"):  # whole scales need no decoder
        with GuidanceWriter(tmp_path / profile, GuidanceSchema(sites=[SiteSpec(name="a", width=32, profile=profile)])):
            pass
