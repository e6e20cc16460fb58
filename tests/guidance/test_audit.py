"""Audit records in the format, and what they tell: flips, noise, the encoding that survives."""

import numpy as np
import pytest
import torch

from tracekit import numerics
from tracekit.cli import main
from tracekit.guidance import Audit, GuidanceSchema, GuidanceWriter, SiteSpec, audit, audit_tokens, open_dataset, verify
from tracekit.guidance.pure import PureReader
from tracekit.guidance.regime import encode

T = 6000


def sites(**changes):
    return [
        SiteSpec(name="layers.0.moe_input", width=256, bits=1, global_scale=448.0, **changes),
        SiteSpec(name="layers.0.k", width=64, planes=2, bits=2, profile="mxfp4-rceil", block=32, **changes),
        SiteSpec(name="layers.0.v", width=32, planes=2, bits=3, global_scale=None),
        SiteSpec(name="layers.1.v", width=32, bits=0),
    ]


def rollout(rng, specs, n):
    """`{site: (x, codes, scales, token_scale)}` as a sampler has it."""
    out = {}
    for s in specs:
        x = torch.from_numpy(rng.standard_t(5, (n, s.planes, s.width)).astype(np.float32))
        g = None if s.global_scale is not None else torch.full((n, 1, 1), 100.0)
        fixed = s.global_scale if s.scale_format == "e4m3" else None
        q = numerics.quantize(x, s.profile, global_scale=fixed if g is None else g)
        token_scale = None if g is None else np.full(n, 100.0, np.float32)
        out[s.name] = (x, q.codes.numpy(), q.scales.numpy(), token_scale)
    return out


def rows(made):
    return {name: r[1:] for name, r in made.items()}


def noisy(x, sigma, rng):
    rms = x.square().mean(-1, keepdim=True).sqrt()
    a, b = (torch.from_numpy(rng.normal(size=x.shape).astype(np.float32)) for _ in range(2))
    return x + sigma / 2**0.5 * (x * a + rms * b)


@pytest.mark.parametrize("encoding", ["lossless", "rm15"])
def test_audited_tokens_come_back_whole_from_both_readers(tmp_path, encoding):
    rng = np.random.default_rng(0)
    schema = GuidanceSchema(sites=sites())
    made = rollout(rng, schema.sites, T)
    with GuidanceWriter(tmp_path, schema, encoding=encoding, chunk_tokens=100) as w:
        t = w.begin("a", token_ids=np.arange(T + 1))
        for name, (_, codes, scales, token_scale) in made.items():
            for lo in range(0, T, 1500):
                part = slice(lo, lo + 1500)
                g = None if token_scale is None else token_scale[part]
                t.append(name, lo, codes[part], scales[part], g, audit=True)
        assert t.commit().result()
        w.append_batch(["b"], [np.arange(T + 1)], 0, [T], rows(made), audit=True)
        kept = {k: (None if k == "layers.1.v" else c, s, g) for k, (c, s, g) in rows(made).items()}
        w.append_batch(["plain"], [np.arange(T + 1)], 0, [T], kept)
    reader, pure = open_dataset(tmp_path), PureReader(tmp_path)
    for traj in "ab":
        tokens = audit_tokens(traj, 0, T)
        assert 0 < len(tokens) < 20
        got, again = reader.audit(traj), pure.audit(traj)
        assert list(got) == sorted(made) == list(again)
        for name, (_, codes, scales, _) in made.items():
            for r in (got[name], again[name]):
                assert r.tokens.tolist() == tokens and r.site.bits == 4 and r.site.encoding == "lossless"
                np.testing.assert_array_equal(r.codes, codes[tokens])
                np.testing.assert_array_equal(r.scales, scales[tokens])
                np.testing.assert_array_equal(r.token_scale, 100.0 if "0.v" in name else r.site.global_scale)
    assert reader.audit("plain") == {} == pure.audit("plain")
    low = reader["a"].read(sites=["layers.0.k"])["layers.0.k"]
    np.testing.assert_array_equal(low.unpack(), made["layers.0.k"][1] & 3)
    assert sum(len(r["damage"]) for r in verify(tmp_path)) == 0


def test_what_an_audit_refuses(tmp_path):
    made = rollout(np.random.default_rng(0), sites(), 50)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=sites())) as w:
        t = w.begin("a", token_ids=np.arange(51))
        _, codes, scales, _ = made["layers.0.moe_input"]
        with pytest.raises(ValueError, match="whole codes"):
            t.append("layers.0.moe_input", 0, codes[..., :32], scales, packed=True, audit=True)
        with pytest.raises(ValueError, match="full codes are 0 to 15"):
            w._core.audit(t._handle, 0, [3], (codes[:1] | 16, False, scales[:1], None))
        with pytest.raises(ValueError, match="audit of token 51, but token_ids has 51"):
            w._core.audit(t._handle, 0, [51], (codes[:1], False, scales[:1], None))
        with pytest.raises(ValueError, match="bytes"):
            w._core.audit(t._handle, 0, [3], (codes[:2], False, scales[:1], None))


def test_the_audit_encodes_rows_as_the_writer_does(tmp_path):
    for encoding in ("lossless", "compact", "low2", "rm15"):
        specs = [SiteSpec(name="x", width=100, planes=2, bits=1, global_scale=448.0, encoding=encoding)]
        made = rollout(np.random.default_rng(1), specs, T)
        with GuidanceWriter(tmp_path / encoding, GuidanceSchema(sites=specs)) as w:
            w.append_batch(["a"], [np.arange(T + 1)], 0, [T], rows(made), audit=True)
        reader = open_dataset(tmp_path / encoding)
        audited = reader.audit("a")["x"]
        record, stored = encode(audited, encoding, 1), reader["a"].read(sites=["x"])["x"]
        np.testing.assert_array_equal(record.unpack(), stored.unpack()[audited.tokens])
        np.testing.assert_array_equal(record.scales, stored.scales[audited.tokens])
        if encoding != "lossless":
            np.testing.assert_array_equal(record.checks, stored.checks[audited.tokens])


def audited(sigma, n=400, width=2048, spikes=0.0):
    from tracekit.guidance import AuditRows

    rng = np.random.default_rng(3)
    site = SiteSpec(name="x", width=width, bits=4, global_scale=448.0, encoding="lossless")
    x, codes, scales, _ = rollout(rng, [site], n)["x"]
    sums = Audit()
    r = AuditRows(site, np.arange(n), codes, scales, np.full(n, 448.0, np.float32))
    mine = noisy(x, sigma, rng)
    mine = torch.where(torch.from_numpy(rng.random(x.shape) < spikes), -mine, mine)
    sums.add(mine, r, bits=1)
    return sums.sites["x"]


def test_sigma_is_found_and_flips_follow_it():
    assert audited(0.0, n=20).sigma == 0.0 and audited(0.0, n=20).flip_rate == 0.0
    for sigma in (0.003, 0.01, 0.03):
        s = audited(sigma, n=60)
        assert s.sigma == pytest.approx(sigma, rel=0.1)
        assert 2.5 * sigma < s.flip_rate < 5 * sigma and s.adjacency > 0.99
        assert s.error("lossless") < s.flip_rate / 20


def test_the_encoding_that_is_affordable_follows_the_noise():
    quiet, loud = audited(0.003, n=60), audited(0.3, n=20)
    assert quiet.affordable() == "rm15"
    assert quiet.error("rm15") <= max(3.5 * quiet.sigma**2, quiet.error("lossless"))
    assert loud.affordable() == "lossless"
    assert audited(0.06, n=60).affordable() == "low2"
    near = audited(0.08, n=60)
    assert near.affordable() == "compact", near.errors
    assert near.error("rm15") > max(3.5 * near.sigma**2, near.error("lossless"))
    jumps = audited(0.003, n=20, spikes=0.01)
    assert jumps.adjacency < 0.99 and jumps.affordable() == "lossless"


def test_stats_on_the_command_line(tmp_path, capsys):
    rng = np.random.default_rng(5)
    specs = [SiteSpec(name="layers.0.moe_input", width=512, bits=1, global_scale=448.0)]
    made = rollout(rng, specs, T)
    with GuidanceWriter(tmp_path / "step0", GuidanceSchema(sites=specs)) as w:
        w.append_batch(["a"], [np.arange(T + 1)], 0, [T], rows(made), audit=True)
    assert main(["guidance", "stats", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{len(audit_tokens('a', 0, T))}" in out and "H(low bit)" in out and "0.99" in out
    x = noisy(made["layers.0.moe_input"][0], 0.01, rng)[audit_tokens("a", 0, T)]
    np.savez(tmp_path / "x.npz", **{"a|layers.0.moe_input": x.numpy()})
    assert main(["guidance", "stats", str(tmp_path), "--activations", str(tmp_path / "x.npz")]) == 0
    out = capsys.readouterr().out
    assert "layers.0.moe_input" in out and "->" in out and "sigma" in out
    np.savez(tmp_path / "y.npz", **{"a|other": x.numpy()})
    assert main(["guidance", "stats", str(tmp_path), "--activations", str(tmp_path / "y.npz")]) == 4
    sums = audit(open_dataset(tmp_path / "step0"), lambda traj, site, tokens: x)
    assert 0.005 < sums["layers.0.moe_input"].sigma < 0.02
