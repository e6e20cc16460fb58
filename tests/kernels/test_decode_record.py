"""Records decoded on the device against the decoder of the store, and rounded under without leaving it."""

import numpy as np
import pytest
import torch

import tracekit.guidance as tg
from tracekit.guidance import complete as completion
from tracekit.kernels import DeviceRecord, decode_on_device, guided_from_record, unpack_low_bits
from tracekit.numerics import global_scale_for, guided_round, quantize


def stored(tmp_path, x, encoding, profile, bits, per_token):
    """(the rows x [T, K] as a reader gives them back, their encode scale)."""
    token = per_token and profile == "nvfp4-exact"
    g = global_scale_for(x.abs().amax(-1, keepdim=True) if token else x.abs().amax())
    q = quantize(x, profile, global_scale=g)
    fixed = None if token else float(g) if profile == "nvfp4-exact" else 1.0
    block = 16 if profile == "nvfp4-exact" else 32
    site = tg.SiteSpec(name="x", width=x.shape[1], bits=bits, profile=profile, block=block, global_scale=fixed,
                       encoding=encoding)  # fmt: skip
    rows = {"x": (q.codes.numpy() & ((1 << bits) - 1), q.scales.numpy(), g.squeeze(-1).numpy() if token else None)}
    with tg.GuidanceWriter(tmp_path, tg.GuidanceSchema(sites=[site])) as w:
        w.append_batch(["t"], [np.arange(len(x) + 1)], 0, [len(x)], rows)
    return tg.open_dataset(tmp_path)["t"].read()["x"], g


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "encoding, bits, sigma", [("lossless", 2, 0.1), ("compact", 1, 0.1), ("compact", 3, 0.03), ("low2", 1, 0.05),
                              ("rm15", 1, 0.04), ("rm15", 1, 0.002)]
)  # fmt: skip
def test_equals_the_stores_decoder(device, tmp_path, monkeypatch, encoding, bits, sigma, profile, per_token):
    """Codes, scales and row_ok, at noise where some rows are searched and some given up; then guided_qdq from them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 512, generator=g) / torch.rand(60, 512, generator=g).clamp(min=0.05).sqrt()
    record, scale = stored(tmp_path, x, encoding, profile, bits, per_token)
    y = x * (1 + sigma * torch.randn(x.shape, generator=g))
    stats = {}
    codes, scales, ok = tg.decode(y, record, sigma=sigma, stats=stats)
    if encoding != "lossless":  # as on a GPU: search everywhere, ask nothing
        monkeypatch.setattr(completion, "_to_search", lambda ok: slice(None))
    there = DeviceRecord.of(record, device)
    low, got_scales, got_ok = decode_on_device(y.to(device), there, sigma=sigma)
    assert torch.equal(got_ok.cpu(), ok)
    assert torch.equal(got_scales.cpu(), scales)
    assert torch.equal(unpack_low_bits(low, bits, 512).cpu()[ok], codes[ok])
    values, rows_ok = guided_from_record(y.to(device), there, sigma=sigma)
    want = guided_round(y, codes, scales, bits=bits, profile=profile, global_scale=scale)
    assert torch.equal(values.cpu(), want) and torch.equal(rows_ok.cpu(), ok)
    assert stats["rows"] == 60 and ok.any()


def test_search_repairs_and_gives_up(device, tmp_path, monkeypatch):
    """The two outcomes that the comparison above depends on do occur."""
    monkeypatch.setattr(completion, "_to_search", lambda ok: slice(None))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 512, generator=g)
    record, _ = stored(tmp_path, x, "low2", "nvfp4-exact", 1, False)
    seen = {}
    tg.decode(x * (1 + 0.1 * torch.randn(x.shape, generator=g)), record, stats=seen)
    assert seen["rows_recovered"] > 0 and seen["rows_fallback"] > 0, seen
