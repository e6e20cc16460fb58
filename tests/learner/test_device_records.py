"""What the learner does on a GPU, by the same operators on a CPU: records stay packed, sites round by kernels."""

from functools import partial

import numpy as np
import pytest
import torch
from loop_fixtures import build, gradients, opened

from tracekit import numerics
from tracekit.kernels import fake_quantize
from tracekit.learner import guide, update
from tracekit.learner.guide import DeviceSiteRecord, SiteRecord
from tracekit.learner.guided import round_weights
from tracekit.learner.records import load_records

WIDE = ("--model.dim", "256", "--model.head-dim", "128", "--log.by-layer")
CASES = [
    ("lossless", ("--guidance.bits", "1", "--model.head-dim", "48")),
    ("lossless", ("--guidance.bits", "3", "--quant.global-scale", "token", "--guidance.rounding", "bracket_open")),
    ("lossless", ("--guidance.bits", "4", "--quant.experts", "mxfp4-rceil", "--quant.kv", "kv-mx16")),
    ("lossless", ("--guidance.mode", "scale_only")),
    ("compact", ("--guidance.bits", "2", *WIDE)),
    ("low2", (*WIDE,)),
    ("rm15", ("--quant.global-scale", "token", *WIDE)),
]


@pytest.mark.parametrize("encoding, flags", CASES)
def test_both_ways_train_alike(tmp_path, monkeypatch, encoding, flags):
    """Log-probs, gradients and all metrics of the pass that opens a batch, bit for bit, by way of the operators."""
    built = build(tmp_path, "--guidance.encoding", encoding, *flags)
    found = []
    for on_device in (False, True):
        monkeypatch.setattr(update, "load_records", partial(load_records, on_device=on_device))
        if on_device:
            monkeypatch.setattr(guide, "own_rounding", lambda x, profile, g: fake_quantize(x, profile, global_scale=g))
        x = opened(built)
        batch = next(built.loop.update.batches(x.rollouts, x.advantages, np.arange(16)))
        records = built.loop.update.guide(batch, x).records.values()
        assert {type(r) is DeviceSiteRecord for r in records} == {on_device}
        metrics = built.loop.update.open(x)
        found.append((x.tokens.values["logp_old"], gradients(built, x)[0], metrics))
    (logp, grads, metrics), (other, others, again) = found
    assert np.array_equal(logp, other)
    assert all(torch.equal(grads[n], others[n]) for n in grads) and any(g.abs().sum() > 0 for g in grads.values())
    assert metrics == again and "guidance/flip_rate" in metrics


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
@pytest.mark.parametrize("width", [64, 40])
def test_weights_of_one_pass(profile, width):
    """Codes, scales and values of a kernel's single pass are those of quantise and then dequantise."""
    w = torch.randn(3, 5, width)
    scale = numerics.expert_global_scale(w, profile=profile, power_of_two=True)
    (a, values), (b, again) = (round_weights(w, profile, scale, with_values=True, kernel=k) for k in (False, True))
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and torch.equal(values, again)
    assert torch.equal(a.packed, b.packed) and torch.equal(b.dequantize(), values)
    assert round_weights(w, profile, scale, with_values=False, kernel=True)[1] is None


def test_codes_stay_packed(tmp_path):
    """One bit a value crosses to the device, and what it unpacks to is the host's codes."""
    built = build(tmp_path)
    x = opened(built)
    batch = next(built.loop.update.batches(x.rollouts, x.advantages, np.arange(16)))
    host, device = (
        load_records(x.reader, batch, x.rollouts, built.loop.update.sites, on_device=on) for on in (False, True)
    )
    for site, record in device.items():
        width = host[site].codes.shape[-1]
        assert record.stored.codes.shape[-1] == width // 8
        there = record.decode(torch.randn(record.total, host[site].codes.shape[1], width), None)
        assert type(there) is SiteRecord and there.codes.shape[-1] == width // 8
        assert torch.equal(there.low_bits(width), host[site].codes)
        assert torch.equal(there.scales, host[site].scales)
