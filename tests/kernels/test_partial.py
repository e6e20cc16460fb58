"""Widths that blocks do not divide, strides, empty tensors: every FP4 kernel against the reference, byte for byte."""

import pytest
import torch

from tracekit.kernels import (
    fake_quantize_experts,
    guided_qdq,
    pack_low_bits,
    quantize_pack,
    quantize_pack_into,
    write_kv,
)
from tracekit.kernels.quantize_pack import KERNEL_PROFILES
from tracekit.numerics import dequantize, guided_round, profile_info, quantize, unpack_codes

WIDTHS = [1, 7, 15, 17, 31, 33, 40, 45]
QUICK = ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"]
CASES = [
    pytest.param(p, k, marks=[] if p in QUICK or k == 45 else pytest.mark.long) for p in KERNEL_PROFILES for k in WIDTHS
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def odd_rows(k, dtype, seed=0):
    """[19, k]: rows over several decades, with NaN, infinities, -0, a zero row and, last in their rows, maxima."""
    g = torch.Generator().manual_seed(seed + k)
    x = torch.randn(19, k, generator=g) * torch.exp(2.0 * torch.randn(19, 1, generator=g))
    x[1] = 0
    x[2, -1], x[3, -1], x[4, 0], x[5, -1] = float("nan"), float("inf"), -0.0, -900.0
    x[6] = 6 * 2.0 ** torch.randint(-8, 8, (k,), generator=g)
    x[7, :-1] = 0
    x[8] *= 1e-30
    return x.to(dtype)


def scale_for(profile, g):
    return 1 / g if profile_info(profile).decode_global else g


@pytest.mark.parametrize("profile, k", CASES)
def test_quantize(device, profile, k):
    """Codes, scales, low bits and values; one scale, and one a row."""
    bits, dtype = 1 + k % 4, DTYPES[k % 3]
    x = odd_rows(k, dtype)
    for g in (torch.tensor(33.7), torch.rand(19, 1) * 300 + 1):
        g = scale_for(profile, g)
        want = quantize(x, profile, global_scale=g)
        args = dict(global_scale=g.to(device), bits=bits, with_values=True)
        packed, scales, low, values = quantize_pack(x.to(device), profile, **args)
        assert torch.equal(packed.cpu(), want.packed) and torch.equal(scales.cpu(), want.scales)
        assert torch.equal(low.cpu(), pack_low_bits(want.codes, bits))
        assert torch.equal(values.cpu(), want.dequantize())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("profile, k", [("nvfp4-exact", 21), ("mxfp4-rceil", 49), ("kv-mx16", 3)])
def test_writes_no_other_byte(device, profile, k, bits):
    """Buffers between guards, poisoned beforehand: whole rows and nothing else is written."""
    x, p = odd_rows(k, torch.bfloat16), profile_info(profile)
    want = quantize(x, profile, global_scale=64.0)
    widths = (-(-k // 2), -(-k // p.block), -(-k * bits // 8))
    packed, scales, low = (torch.full((21, w), 0xAB, dtype=torch.uint8, device=device) for w in widths)
    values = torch.full((21, k), 0.375, dtype=x.dtype, device=device)
    quantize_pack_into(
        x.to(device), profile, global_scale=torch.tensor(64.0, device=device), packed=packed[1:20],
        scales=scales[1:20], low=low[1:20], bits=bits, values=values[1:20],
    )  # fmt: skip
    wanted = (want.packed, want.scales, pack_low_bits(want.codes, bits))
    for got, expected in zip((packed, scales, low), wanted, strict=True):
        assert torch.equal(got[1:20].cpu(), expected) and (got[[0, 20]] == 0xAB).all()
    assert torch.equal(values[1:20].cpu(), want.dequantize()) and (values[[0, 20]] == 0.375).all()


@pytest.mark.parametrize("profile, k", CASES)
def test_guided(device, profile, k):
    """Every number of bits and both roundings, with blocks that have no record, whole and short ones."""
    dtype = DTYPES[k % 3]
    x = odd_rows(k, dtype)
    y = (x.float() * (1 + 0.2 * torch.randn(x.shape))).to(dtype)
    g = scale_for(profile, torch.rand(19, 1) * 300 + 1)
    q = quantize(x, profile, global_scale=g)
    scales = q.scales.clone()
    scales[10, -1] = scales[11, 0] = profile_info(profile).missing_scale
    for bits in range(5):
        args = dict(bits=bits, profile=profile, rounding="bracket_open" if (bits + k) % 2 else "bracket")
        want = guided_round(y, q.codes & ((1 << bits) - 1), scales, global_scale=g, **args)
        low = pack_low_bits(q.codes, bits).to(device) if bits else None
        got = guided_qdq(y.to(device), low, scales.to(device), global_scale=g.to(device), **args)
        assert got.dtype == dtype and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-even"])
def test_weights(device, profile):
    """Gate and up of 27 inputs a row, one scale an expert; what is published is what is multiplied by."""
    gate, up = torch.randn(3, 4, 27).to(device), (5 * torch.randn(3, 4, 27)).to(device)
    for w, out in zip((gate, up), fake_quantize_experts(gate, up, profile=profile), strict=True):
        g = None if out.global_scale is None else out.global_scale.cpu()
        want = quantize(w.cpu(), profile, global_scale=g)
        assert torch.equal(out.packed.cpu(), want.packed) and torch.equal(out.scales.cpu(), want.scales)
        again = dequantize(unpack_codes(out.packed.cpu(), 27), out.scales.cpu(), profile, g)
        assert torch.equal(out.values.cpu(), again)


@pytest.mark.parametrize("profile, d", [("nvfp4-exact", 40), ("mxfp4-rceil", 40), ("kv-mx16", 21)])
@pytest.mark.parametrize("layout", ["linear", "native"])
def test_kv(device, profile, d, layout):
    """Heads of 40 and 21 channels, slots out of order and one negative; untouched slots keep their bytes."""
    slots = torch.tensor([5, 0, -1, 7])
    x = torch.randn(4, 3, d).bfloat16()
    want = quantize(x, profile, global_scale=50.0)
    nb = want.scales.shape[-1]
    kept = slots >= 0
    codes = torch.full((8, 3, -(-d // 2)), 0xAB, dtype=torch.uint8)
    whole = torch.full((8, 3, nb), 0xAB, dtype=torch.uint8)
    codes[slots[kept]], whole[slots[kept]] = want.packed[kept], want.scales[kept]
    scales = whole if layout == "linear" else whole.view(2, 4, 3, nb).transpose(1, 2).contiguous()
    got_codes, got_scales = torch.full_like(codes, 0xAB).to(device), torch.full_like(scales, 0xAB).to(device)
    args = dict(global_scale=torch.tensor(50.0, device=device), bits=3, layout=layout)
    low = write_kv(x.to(device), slots.to(device), got_codes, got_scales, profile, **args)
    assert torch.equal(got_codes.cpu(), codes) and torch.equal(got_scales.cpu(), scales)
    assert torch.equal(low.cpu()[kept], pack_low_bits(want.codes, 3)[kept])


@pytest.mark.parametrize("k", [21, 32])
def test_strides(device, k):
    """Columns of a transpose, every second row, a slice of wider rows: the values count, not how they lie."""
    base = torch.randn(2 * k, 40).bfloat16()
    g = torch.tensor(70.0)
    for x in (base.t()[:, :k], base[::2, :k], base[:, 3 : 3 + k].expand(2, -1, -1)):
        want = quantize(x.contiguous(), "nvfp4-exact", global_scale=g)
        y = base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
        assert torch.equal(y.cpu(), x)
        packed, scales, low, _ = quantize_pack(y, "nvfp4-exact", global_scale=g.to(device), bits=2)
        assert torch.equal(packed.cpu(), want.packed) and torch.equal(scales.cpu(), want.scales)
        args = dict(bits=2, profile="nvfp4-exact")
        codes = want.codes & 3
        guided = guided_qdq(y, low, scales, global_scale=g.to(device), **args)
        assert torch.equal(guided.cpu(), guided_round(x, codes, want.scales, global_scale=g, **args))


@pytest.mark.parametrize("shape", [(0, 32), (0, 21), (3, 0), (2, 0, 5)])
@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
def test_empty(device, shape, profile):
    """No rows or no columns: results of the right shapes with nothing in them."""
    x = torch.zeros(shape, device=device)
    g = torch.tensor(1.0, device=device)
    k, block = shape[-1], profile_info(profile).block
    packed, scales, low, values = quantize_pack(x, profile, global_scale=g, bits=3, with_values=True)
    assert packed.shape == (*shape[:-1], -(-k // 2)) and scales.shape == (*shape[:-1], -(-k // block))
    assert low.shape == (*shape[:-1], -(-k * 3 // 8)) and values.shape == shape
    assert guided_qdq(x, low, scales, bits=3, profile=profile, global_scale=g).shape == shape
