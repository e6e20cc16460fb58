"""Expert weights and K/V writes: what the trainer multiplies by is what gets published or stored."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import fake_quantize_experts, pack_low_bits, write_kv
from tracekit.numerics import dequantize, fake_quantize, quantize, unpack_codes


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
def test_published_weights_are_the_ones_used(device, profile):
    gate = torch.randn(3, 4, 64, device=device).bfloat16().requires_grad_()
    up = (torch.randn(3, 4, 64, device=device) * 5).bfloat16().requires_grad_()
    for w, out in zip((gate, up), fake_quantize_experts(gate, up, profile=profile), strict=True):
        again = dequantize(unpack_codes(out.packed, 64), out.scales, profile, out.global_scale, torch.bfloat16)
        assert torch.equal(out.values, again)
        assert torch.equal(out.values, fake_quantize(w, profile, global_scale=out.global_scale))
        weight = torch.randn_like(w)
        (out.values * weight).sum().backward()
        assert torch.equal(w.grad, weight)


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"])
def test_kv_write(device, profile):
    x = torch.randn(5, 2, 64, device=device).bfloat16()
    g = torch.tensor(300.0, device=device)
    q = quantize(x.cpu(), profile, global_scale=300.0)
    slots = torch.tensor([7, 0, 3, 9, 4], device=device)
    codes = torch.full((10, 2, 32), 0xAB, dtype=torch.uint8, device=device)
    scales = torch.full((10, 2, q.scales.shape[-1]), 0xAB, dtype=torch.uint8, device=device)
    low = write_kv(x, slots, codes, scales, profile, global_scale=g, bits=1)
    assert torch.equal(codes[slots].cpu(), q.packed) and torch.equal(scales[slots].cpu(), q.scales)
    assert torch.equal(low.cpu(), pack_low_bits(q.codes, 1))
    assert (codes[[1, 2, 5, 6, 8]] == 0xAB).all()
    with pytest.raises(ConfigError, match="do not take"):
        write_kv(x, slots, codes[:, :1], scales, profile, global_scale=g)
