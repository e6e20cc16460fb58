"""A small dataset with every kind of site, and the numbers that went into it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec

sys.path.insert(0, str(Path(__file__).parent))  # shared modules, under any pytest import mode


def make_schema(**user):
    return GuidanceSchema(
        sites=[
            SiteSpec(name="layers.0.moe_input", width=100, bits=1, global_scale=448.0),
            SiteSpec(name="layers.0.k", width=64, planes=3, bits=2, profile="mxfp4-rceil", block=32),
            SiteSpec(name="layers.0.v", width=24, planes=2, bits=3, global_scale=None),
            SiteSpec(name="layers.1.moe_input", width=96, bits=4),
            SiteSpec(name="layers.1.k", width=64, planes=2, bits=0, global_scale=None),
        ],
        user=user,
    )


def make_wide_schema():
    """Chunks of a few tokens are large enough to be written from where they are."""
    schema = make_schema()
    schema.sites.insert(1, SiteSpec(name="layers.0.moe_wide", width=65536))
    return schema


def make_rows(rng, schema, n):
    """`{site: (codes [n, planes, K] | None, scales, token_scale | None)}` with skewed scales, as real ones are."""
    rows = {}
    for s in schema.sites:
        codes = rng.integers(0, 1 << s.bits, (n, s.planes, s.width), dtype=np.uint8) if s.bits else None
        scales = (100 + rng.normal(0, 4, (n, s.planes, s.scale_row))).astype(np.uint8)
        rows[s.name] = (codes, scales, rng.random(n, dtype=np.float32) if s.global_scale is None else None)
    return rows


def make_dataset(path, lengths, *, seed=0, prefix=None, chunk_tokens=256, schema=None, **options):
    """Writes trajectories `t0 …` in one batch; returns what a reader must give back."""
    rng = np.random.default_rng(seed)
    schema = schema or make_schema(run="test")
    rows = make_rows(rng, schema, sum(lengths))
    tokens = [rng.integers(0, 1000, n + 1) for n in lengths]
    ids = [f"t{i}" for i in range(len(lengths))]
    with GuidanceWriter(path, schema, chunk_tokens=chunk_tokens, **options) as w:
        w.append_batch(ids, tokens, 0, np.array(lengths), rows, policy_version=3)
    return SimpleNamespace(dir=path, schema=schema, rows=rows, tokens=tokens, ids=ids, lengths=list(lengths))


def assert_rows(got, want, at):
    """Compares a batch with rows `at` of what was written."""
    for name, (codes, scales, token_scale) in want.items():
        np.testing.assert_array_equal(got[name].scales, scales[at])
        if codes is None:
            assert got[name].codes is None
        else:
            np.testing.assert_array_equal(got[name].codes, codes[at])
        if token_scale is not None:
            np.testing.assert_array_equal(got[name].token_scale, token_scale[at])


@pytest.fixture(name="store")
def store_helpers():
    return SimpleNamespace(
        schema=make_schema, wide_schema=make_wide_schema, rows=make_rows, dataset=make_dataset, check=assert_rows
    )
