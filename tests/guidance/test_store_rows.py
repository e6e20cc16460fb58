"""`append_rows`: trajectories from rows that hold all sites side by side."""

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset
from tracekit.guidance.writer import QueueFullError

SITES = [
    SiteSpec(name="a", planes=1, width=64, profile="nvfp4-exact", block=16, bits=1, global_scale=1.0),
    SiteSpec(name="k", planes=2, width=32, profile="nvfp4-exact", block=16, bits=4, global_scale=1.0),
    SiteSpec(name="s", planes=1, width=32, profile="nvfp4-exact", block=16, bits=0, global_scale=1.0),
]


def layout():
    """Rows with scales first, a gap, then codes."""
    at, scales, codes = 3, {}, {}
    for s in SITES:
        scales[s.name] = (at, s.planes * s.scale_row)
        at += scales[s.name][1]
    for s in SITES:
        codes[s.name] = (at, s.planes * s.code_row) if s.bits else None
        at += codes[s.name][1] if s.bits else 0
    return {s.name: (codes[s.name], scales[s.name]) for s in SITES}, at


def test_is_the_same_as_site_by_site(tmp_path):
    rng, (columns, width) = np.random.default_rng(0), layout()
    schema, items = GuidanceSchema(sites=SITES), []
    for i, tokens in enumerate((1, 300, 17)):
        rows = rng.integers(0, 127, (tokens, width), dtype=np.uint8)
        items.append((f"t{i}", rng.integers(0, 1000, tokens + 1), 5 + i, rows, {"n": i} if i else None))
    with GuidanceWriter(tmp_path / "rows", schema) as writer:
        writer.append_rows(items, columns)
        assert writer.stats()["trajectories"] == 3  # committed, not only queued
        writer.append_rows([], columns)
    with GuidanceWriter(tmp_path / "sites", schema) as writer:
        for name, ids, policy, rows, extra in items:
            t = writer.begin(name, token_ids=ids, policy_version=policy)
            for s in SITES:
                codes, (a, n) = columns[s.name]
                packed = None if codes is None else rows[:, codes[0] : sum(codes)]
                t.append(s.name, 0, packed, rows[:, a : a + n], packed=True)
            t.commit(extra=extra)
    one, other = open_dataset(tmp_path / "rows"), open_dataset(tmp_path / "sites")
    for name, ids, policy, rows, extra in items:
        for s in SITES:
            a, b = (d[name].read(sites=[s.name], token_ids=ids)[s.name] for d in (one, other))
            assert np.array_equal(a.scales, b.scales)
            assert len(a.scales) == len(rows)
            assert (a.codes is None and b.codes is None) or np.array_equal(a.codes, b.codes)
        for d in (one, other):
            assert (d[name].policy_version, d[name].extra) == ((policy, policy), extra)


def test_refusals(tmp_path):
    columns, width = layout()
    rows, ids = np.zeros((4, width), np.uint8), np.arange(5)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=SITES)) as writer:
        with pytest.raises(ValueError, match="missing \\['s'\\]"):
            writer.append_rows([("t", ids, 0, rows, None)], {k: v for k, v in columns.items() if k != "s"})
        with pytest.raises(ValueError, match="outside rows"):
            writer.append_rows([("t", ids, 0, rows[:, :-1].copy(), None)], columns)
        with pytest.raises(ValueError, match="bytes in one call"):
            writer.append_rows([("t", ids, 0, rows, None), ("u", ids, 0, rows[:, :-1], None)], columns)
        with pytest.raises(ValueError):
            writer.append_rows([("t", ids, 0, rows, None)], columns | {"a": ((0, 3), (0, 4))})
        writer.append_rows([("t", ids, 0, rows, None)], columns)  # what was refused has left nothing behind
        with pytest.raises((ValueError, DataError), match="t"):
            writer.append_rows([("t", ids, 0, rows, None)], columns)
    assert open_dataset(tmp_path).ids() == ["t"]


def test_a_full_queue_is_told(tmp_path):
    columns, width = layout()
    big = np.zeros((20000, width), np.uint8)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=SITES), queue_bytes=1 << 16, on_full="drop") as writer:
        with pytest.raises(QueueFullError):
            for i in range(50):
                writer.append_rows([(f"t{i}", np.arange(20001), 0, big, None)], columns)
