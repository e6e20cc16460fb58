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


def swizzled(scales):
    """V's scales of whole pages [pages, Hkv, page, S] as SGLang's native pool has them, by its index formula."""
    out = torch.empty_like(scales)
    s_count = scales.shape[-1]
    for t in range(scales.shape[-2]):
        for s in range(s_count):
            out[..., t // 4 * 4 + s // (s_count // 4), s % (s_count // 4) * 4 + t % 4] = scales[..., t, s]
    return out


@pytest.mark.parametrize("layout", ["linear", "native", "native_v"])
@pytest.mark.parametrize("heads, d, page", [(2, 64, 4), (3, 128, 8)])
def test_kv_layouts(device, layout, heads, d, page):
    """Pages in any order, a negative slot that writes nothing, one scale a token; the rest of the pool untouched."""
    pages = 5
    order = torch.randperm(pages * page)
    slots = order[: 3 * page + 1].clone()
    x = torch.randn(len(slots), heads, d).bfloat16()
    g = torch.rand(len(slots), 1, 1) * 300 + 1
    q = quantize(x, "nvfp4-exact", global_scale=g)
    slots[2] = -1
    kept = slots >= 0
    codes = torch.full((pages * page, heads, d // 2), 0xAB, dtype=torch.uint8)
    whole = torch.full((pages * page, heads, d // 16), 0xAB, dtype=torch.uint8)
    codes[slots[kept]], whole[slots[kept]] = q.packed[kept], q.scales[kept]
    want = whole if layout == "linear" else whole.view(pages, page, heads, -1).transpose(1, 2).contiguous()
    want = swizzled(want) if layout == "native_v" else want
    got_codes = torch.full_like(codes, 0xAB).to(device)
    got_scales = torch.full_like(want, 0xAB).to(device)
    args = (x.to(device), slots.to(device), got_codes, got_scales, "nvfp4-exact")
    low = write_kv(*args, global_scale=g.to(device), bits=2, layout=layout)
    assert torch.equal(got_codes.cpu(), codes) and torch.equal(got_scales.cpu(), want)
    assert torch.equal(low.cpu()[kept], pack_low_bits(q.codes, 2)[kept])


def test_kv_reference_places_scales_as_the_kernel_does(device):
    """Without Triton the same bytes land in the same places."""
    from tracekit.kernels.kv_write import scale_places

    slots = torch.randperm(16)[:9]
    pool = torch.arange(16 * 2 * 4).view(4, 4, 2, 4).transpose(1, 2).contiguous()  # [pages, Hkv, page, S]
    flat = swizzled(pool).view(-1)
    linear = torch.arange(16 * 2 * 4).view(16, 2, 4)
    assert torch.equal(flat[scale_places(slots, 2, 4, 4, "native_v")], linear[slots])


def test_kv_refuses(device):
    x = torch.randn(3, 2, 64, device=device)
    codes = torch.zeros(8, 2, 32, dtype=torch.uint8, device=device)
    scales = torch.zeros(4, 2, 2, 4, dtype=torch.uint8, device=device)
    slots = torch.arange(3, device=device)
    g = torch.tensor(1.0, device=device)
    with pytest.raises(ConfigError, match="groups of 4"):
        write_kv(x, slots, codes, scales, "nvfp4-exact", global_scale=g, layout="native_v")
    with pytest.raises(ConfigError, match="layout must be"):
        write_kv(x, slots, codes, scales, "nvfp4-exact", global_scale=g, layout="paged")
    with pytest.raises(ConfigError, match="contiguous"):
        write_kv(x, slots, codes, scales.transpose(0, 0)[::2], "nvfp4-exact", global_scale=g, layout="native")
    args = (x, slots, codes, scales, "nvfp4-exact", g, None, 0, 2, "native")
    torch.library.opcheck(torch.ops.tracekit.write_kv, args, test_utils=("test_schema", "test_faketensor"))
