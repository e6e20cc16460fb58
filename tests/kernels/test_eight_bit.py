"""INT8, INT4 and E4M3 kernels against the reference, byte for byte, and the guided rounding of E4M3 codes."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import guided_qdq_e4m3, pack_low_bits, quantize_eight_bit
from tracekit.numerics import guided_round_e4m3, quantize, quantize_dequantize

PROFILES = ["int8", "int8-rtz", "int4-g128", "fp8-e4m3", "fp8-e4m3-rtz", "mxfp8"]


def same(a, b):
    return torch.equal(torch.nan_to_num(a.cpu().float(), nan=1e30), torch.nan_to_num(b.float(), nan=1e30))


def check(x, profile, device):
    values, codes, scales = quantize_eight_bit(x.to(device), profile)
    want_values, want_codes, want_scales = quantize_dequantize(x, profile)
    assert same(scales, want_scales)
    nan = (want_codes & 127 == 127) & ("int" not in profile)
    assert torch.equal(codes.cpu()[~nan], want_codes[~nan]) and (codes.cpu()[nan] & 127 == 127).all()
    assert same(values, want_values) and values.dtype == x.dtype


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [64, 321])
def test_equals_reference(device, profile, dtype, k, hard_rows):
    check(hard_rows(k=k, dtype=dtype), profile, device)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_bf16(device, profile, every_bf16):
    check(every_bf16, profile, device)


@pytest.mark.parametrize("profile", PROFILES)
def test_midpoints_and_one_step_either_side(device, profile):
    """Of all E4M3 and all small integer neighbours, under scales of exactly one."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = torch.cat([e4m3, torch.arange(-9.0, 128)])
    top = {"int8": 127.0, "int4-g128": 7.5}.get(profile.removesuffix("-rtz"), 448.0)
    mid = torch.cat([grid, (e4m3[1:] + e4m3[:-1]) / 2, torch.arange(-8.5, 128)])
    inf = torch.tensor(torch.inf)
    z = torch.cat([mid, torch.nextafter(mid, inf), torch.nextafter(mid, -inf), -mid]).clamp(-top, top)
    x = torch.cat([torch.full((len(z), 1), top), z[:, None].expand(-1, 15)], 1)
    check(x, profile, device)


def test_rows_longer_than_a_chunk_and_empty(device):
    check(torch.randn(2, 9001).bfloat16(), "int8", device)
    assert quantize_eight_bit(torch.empty(0, 32, device=device), "mxfp8")[2].shape == (0, 1)
    with pytest.raises(ConfigError, match="quantize_pack"):
        quantize_eight_bit(torch.randn(2, 32, device=device), "nvfp4-exact")


@pytest.mark.parametrize("profile", ["mxfp8", "fp8-e4m3"])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
def test_guided_e4m3(device, profile, bits, rounding, hard_rows):
    x = hard_rows(k=45, dtype=torch.float32)
    q = quantize(x, profile)
    g = torch.Generator().manual_seed(bits)
    y = x * (1 + torch.randn(x.shape, generator=g) * torch.logspace(-3, 0, len(x))[:, None])
    y[10:20] = q.dequantize()[10:20]
    codes = q.codes & ((1 << bits) - 1)
    scales = q.scales.clone()
    scales[37, 0] = 255 if profile == "mxfp8" else torch.nan
    args = dict(bits=bits, profile=profile, rounding=rounding)
    want = guided_round_e4m3(y, codes, scales, **args)
    low = pack_low_bits(q.codes, bits)
    assert same(guided_qdq_e4m3(y.to(device), low.to(device), scales.to(device), **args), want)


def test_guided_e4m3_gradient_and_schema(device):
    x = torch.randn(3, 32, device=device, requires_grad=True)
    q = quantize(x, "mxfp8")
    low = pack_low_bits(q.codes, 2)
    weight = torch.randn(3, 32, device=device)
    (guided_qdq_e4m3(x * 2, low, q.scales, bits=2, profile="mxfp8") * weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tracekit.guided_qdq_e4m3, (x, low, q.scales, 2, "mxfp8", False), test_utils=tests)
    torch.library.opcheck(torch.ops.tracekit.quantize_eight_bit, (x.detach(), "int8"), test_utils=tests)
