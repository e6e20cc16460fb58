"""Encodings that need the trainer's activations give back the sampler's codes and scales, or say that they do not."""

import numpy as np
import pytest
import torch

import tracekit.guidance as tg
from tracekit.errors import DataError
from tracekit.guidance.check import check16
from tracekit.guidance.crc import crc32c
from tracekit.numerics import PROFILES, global_scale_for, guided_round, profile_info, quantize, quantize_dequantize


def activations(tokens, width, seed=0):
    """Heavy-tailed values with channel-dependent size."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=g)
    x = x * torch.exp(0.5 * torch.randn(width, generator=g))
    return x / torch.rand(tokens, width, generator=g).clamp(min=0.05).sqrt()


def noisy(x, sigma, seed=1):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(x.shape, generator=g), torch.randn(x.shape, generator=g)
    return x + sigma / 2**0.5 * (x * a + x.square().mean(-1, keepdim=True).sqrt() * b)


def record(tmp_path, x, encoding, profile="nvfp4-exact", bits=1, per_token=False):
    tokens, width = x.shape
    block = 16 if profile == "nvfp4-exact" else 32
    g = global_scale_for(x.abs().amax()) if not per_token else global_scale_for(x.abs().amax(-1, keepdim=True))
    q = quantize(x, profile, global_scale=g)
    fixed = None if per_token else float(g) if profile == "nvfp4-exact" else 1.0
    site = tg.SiteSpec(name="x", width=width, bits=bits, profile=profile, block=block, global_scale=fixed)
    site = tg.SiteSpec(**{**{f: getattr(site, f) for f in site.__slots__}, "encoding": encoding})
    rows = {"x": (q.codes.numpy() & ((1 << bits) - 1), q.scales.numpy(), g.squeeze(-1).numpy() if per_token else None)}
    with tg.GuidanceWriter(tmp_path, tg.GuidanceSchema(sites=[site])) as w:
        w.append_batch(["t"], [np.arange(tokens + 1)], 0, [tokens], rows)
    return q, g, tg.open_dataset(tmp_path)["t"].read()["x"]


def test_check16_is_the_low_half_of_crc32c():
    rows = torch.randint(0, 256, (5, 37), dtype=torch.uint8)
    assert check16(rows).tolist() == [crc32c(r.numpy().tobytes()) & 0xFFFF for r in rows]


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
@pytest.mark.parametrize(("encoding", "sigma"), [("compact", 0.03), ("low2", 0.01), ("lossless", 0.3), ("rm15", 0.002)])
def test_exact_at_the_noise_an_encoding_is_for(tmp_path, encoding, sigma, profile):
    x = activations(200, 1024)
    q, _, rec = record(tmp_path, x, encoding, profile)
    stats = {}
    codes, scales, ok = tg.decode(noisy(x, sigma), rec, sigma=sigma, stats=stats)
    assert ok.float().mean() > 0.99, stats
    assert torch.equal(codes[ok], q.codes[ok] & 1)
    assert torch.equal(scales[ok], q.scales[ok])
    assert stats["rows"] == 200 and stats["rows_fallback"] == int((~ok).sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_more_bits_and_token_scales(tmp_path, bits):
    x = activations(64, 1000)
    q, _, rec = record(tmp_path, x, "compact", bits=bits, per_token=True)
    codes, scales, ok = tg.decode(noisy(x, 0.01), rec)
    assert ok.all() and torch.equal(codes, q.codes & ((1 << bits) - 1)) and torch.equal(scales, q.scales)


@pytest.mark.parametrize(("encoding", "sigma"), [("rm15", 0.04), ("low2", 0.05), ("compact", 0.1)])
def test_search_repairs_most_rows_at_the_edge(tmp_path, encoding, sigma):
    x = activations(400, 2048)
    q, _, rec = record(tmp_path, x, encoding)
    stats = {}
    codes, scales, ok = tg.decode(noisy(x, sigma), rec, sigma=sigma, stats=stats)
    wrong = (codes[ok] != q.codes[ok] & 1).any(1) | (scales[ok] != q.scales[ok]).any(1)
    assert stats["rows_recovered"] > 0 and ok.float().mean() > 0.9, stats
    assert not wrong.any(), (int(wrong.sum()), stats)


@pytest.mark.parametrize("encoding", ["compact", "low2", "rm15"])
def test_rows_that_cannot_be_decoded_are_rounded_plainly(tmp_path, encoding):
    x = activations(300, 512)
    _, g, rec = record(tmp_path, x, encoding)
    y = noisy(x, 0.02)
    y[::3] = torch.randn(100, 512, generator=torch.Generator().manual_seed(2)) * 7
    stats = {}
    codes, scales, ok = tg.decode(y, rec, stats=stats)
    assert not ok[::3].any() and stats["rows_fallback"] >= 100
    got = guided_round(y, codes, scales, bits=1, profile="nvfp4-exact", global_scale=g)
    plain = quantize_dequantize(y, "nvfp4-exact", g)[0]
    assert torch.equal(got[~ok], plain[~ok])
    assert not torch.equal(got[ok], plain[ok])


def test_shapes_with_heads_and_errors(tmp_path):
    x = activations(50 * 2, 256).view(50, 2, 256)
    g = global_scale_for(x.abs().amax())
    q = quantize(x, "nvfp4-exact", global_scale=g)
    site = tg.SiteSpec(name="k", width=256, planes=2, global_scale=float(g), encoding="compact")
    with tg.GuidanceWriter(tmp_path, tg.GuidanceSchema(sites=[site])) as w:
        w.append_batch(["t"], [np.arange(51)], 0, [50], {"k": (q.codes.numpy() & 1, q.scales.numpy(), None)})
    batch = tg.open_dataset(tmp_path).read_batch(["t"])["k"]
    codes, scales, ok = tg.decode(noisy(x, 0.005), batch)
    assert ok.shape == (50, 2) and ok.all() and torch.equal(codes, q.codes & 1) and torch.equal(scales, q.scales)
    with pytest.raises(DataError, match="its record has rows"):
        tg.decode(x[:, :1], batch)


CHAINS = [n for n, p in PROFILES.items() if ("fp4" in n or n == "kv-mx16") and "4over6" not in n]


@pytest.mark.parametrize("width", [48, 80, 100, 1024])
@pytest.mark.parametrize("profile", CHAINS)
def test_every_profile_and_width_decodes_with_every_encoding(tmp_path, profile, width):
    """With the sampler's own activations nothing may be lost, blocks of zeros included."""
    info = profile_info(profile)
    x = activations(40, width)
    x[::4, :32] = 0
    g = global_scale_for(x.abs().amax(), profile=profile)
    q = quantize(x, profile, global_scale=g)
    for encoding in ("lossless", "compact", "low2", "rm15"):
        site = tg.SiteSpec(
            name="x", width=width, profile=profile, block=info.block, global_scale=float(g), encoding=encoding
        )
        with tg.GuidanceWriter(tmp_path / encoding, tg.GuidanceSchema(sites=[site])) as w:
            w.append_batch(["t"], [np.arange(41)], 0, [40], {"x": (q.codes & 1, q.scales, None)})
        rec = tg.open_dataset(tmp_path / encoding)["t"].read()["x"]
        for y, least in ((x, 1.0), (noisy(x, 0.001), 0.7)):
            codes, scales, ok = tg.decode(y, rec, sigma=0.001)
            assert ok.float().mean() >= least, (encoding, float(ok.float().mean()))
            assert torch.equal(codes[ok], q.codes[ok] & 1) and torch.equal(scales[ok], q.scales[ok]), encoding
