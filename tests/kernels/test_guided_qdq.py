"""Guided quantise-dequantise from packed codes against the PyTorch reference."""

import sys

import numpy as np
import pytest
import torch
from run_ptx import run

from tracekit.errors import ConfigError
from tracekit.kernels import guided_qdq, pack_low_bits
from tracekit.kernels._triton import INTERPRET, jit, tl
from tracekit.kernels.guided_floor import _ONE_BIT, scaled
from tracekit.kernels.quantize_pack import KERNEL_PROFILES
from tracekit.numerics import guided_round, profile_info, quantize

PROFILES = ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"]
module = sys.modules["tracekit.kernels.guided_qdq"]  # the package exports a function of this name


@pytest.fixture(params=["values", "codes"])
def rule(request, monkeypatch):
    """Both forms of the bracket's rule, `guided_values` and `guided_floor`."""
    monkeypatch.setattr(module, "FLOOR", request.param == "codes")


def drifted(x, seed=1):
    """A trainer's version of x: noise of several sizes, and rows that sit on the rollout's grid and its midpoints."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=g) * torch.logspace(-3, 0, x.shape[0])[:, None]
    return (x.float() * (1 + noise)).to(x.dtype)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", range(5))
@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
def test_equals_reference(device, rule, profile, dtype, bits, rounding, hard_rows):
    x = hard_rows(dtype=dtype)
    for g in (torch.tensor(448.3) if bits % 2 else torch.rand(48, 1) * 300 + 1,):
        q = quantize(x, profile, global_scale=g)
        y = drifted(x)
        on_grid = q.dequantize()
        y[10:20] = on_grid[10:20]
        y[20:30] = on_grid[20:30] * 1.125
        y[30:35] = on_grid[30:35] * 0.75
        scales = q.scales.clone()
        scales[37, 1] = profile_info(profile).missing_scale
        codes = q.codes & ((1 << bits) - 1)
        want = guided_round(y, codes, scales, bits=bits, profile=profile, global_scale=g, rounding=rounding)
        low = pack_low_bits(q.codes, bits).to(device) if bits else None
        got = guided_qdq(
            y.to(device),
            low,
            scales.to(device),
            bits=bits,
            profile=profile,
            global_scale=g.to(device),
            rounding=rounding,
        )
        assert got.dtype == dtype and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("profile", [p for p in KERNEL_PROFILES if p not in PROFILES])
@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 4)])
def test_other_chains_equal_reference(device, rule, profile, dtype, bits, hard_rows):
    """The orders of operations that differ from nvfp4-exact only in scaling, missing blocks under their own scale."""
    p = profile_info(profile)
    x = hard_rows(dtype=dtype)
    for g in (torch.tensor(448.3), torch.rand(48, 1) * 300 + 1):
        g = 1 / g if p.decode_global else g
        q = quantize(x, profile, global_scale=g)
        y = drifted(x)
        scales = q.scales.clone()
        scales[37, 1] = scales[3, 0] = p.missing_scale
        args = dict(bits=bits, profile=profile)
        want = guided_round(y, q.codes & ((1 << bits) - 1), scales, global_scale=g, **args)
        low = pack_low_bits(q.codes, bits).to(device)
        got = guided_qdq(y.to(device), low, scales.to(device), global_scale=g.to(device), **args)
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
def test_every_cell_and_code(device, rule, bits, rounding):
    """All grid points, midpoints and class midpoints with one fp32 step either side, both signs, all 16 codes."""
    at = torch.cat([torch.arange(0, 120) / 16, torch.arange(0, 50) / 7 + 1e-3])
    inf = torch.tensor(float("inf"))
    z = torch.cat([at, torch.nextafter(at, inf), torch.nextafter(at, -inf)])
    z = torch.cat([z, -z])[:, None].expand(-1, 16).contiguous()
    codes = torch.arange(16, dtype=torch.uint8).expand(z.shape[0], 16).contiguous()
    scales = torch.full((z.shape[0], 1), 0x38, dtype=torch.uint8)
    args = dict(bits=bits, profile="nvfp4-exact", global_scale=1.0, rounding=rounding)
    want = guided_round(z, codes & ((1 << bits) - 1), scales, **args)
    got = guided_qdq(z.to(device), pack_low_bits(codes, bits).to(device), scales.to(device), **args)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil"])
def test_codes_at_any_address(device, rule, profile, bits):
    """Packed codes are read in words: a record that starts at an odd byte of a larger buffer is read as well."""
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(bits))
    q = quantize(x, profile, global_scale=300.0)
    low = pack_low_bits(q.codes, bits)
    y, args = drifted(x), dict(bits=bits, profile=profile, global_scale=300.0)
    want = guided_round(y, q.codes & ((1 << bits) - 1), q.scales, **args)
    buffer = torch.empty(low.numel() + 3, dtype=torch.uint8, device=device)
    for first in range(4):
        there = buffer[first : first + low.numel()].view(low.shape)
        there.copy_(low)
        assert torch.equal(guided_qdq(y.to(device), there, q.scales.to(device), **args).cpu(), want)


def test_backward_is_straight_through(device):
    x = torch.randn(4, 32, device=device, requires_grad=True)
    q = quantize(x, "nvfp4-exact", amax=4.0)
    low = pack_low_bits(q.codes, 1)
    weight = torch.randn(4, 32, device=device)
    out = guided_qdq(x * 2, low, q.scales, bits=1, profile="nvfp4-exact", global_scale=q.global_scale)
    (out * weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight)


def test_meta_schema_and_autograd(device):
    x = torch.randn(4, 32, device=device, requires_grad=True)
    q = quantize(x, "nvfp4-exact", amax=4.0)
    args = (x, pack_low_bits(q.codes, 1), q.scales, q.global_scale, 1, "nvfp4-exact", False)
    torch.library.opcheck(
        torch.ops.tracekit.guided_qdq, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_activation_checkpointing_recomputes_the_same(device):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 32, device=device, requires_grad=True)
    q = quantize(x, "nvfp4-exact", amax=4.0)
    low = pack_low_bits(q.codes, 1)

    def layer(h):
        return guided_qdq(h * 1.01, low, q.scales, bits=1, profile="nvfp4-exact", global_scale=q.global_scale).square()

    plain = torch.autograd.grad(layer(x).sum(), x)[0]
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(plain, again)


def test_refuses_wrong_shapes(device):
    x = torch.randn(2, 32, device=device)
    q = quantize(x, "nvfp4-exact", amax=4.0)
    low = pack_low_bits(q.codes, 1)
    args = dict(profile="nvfp4-exact", global_scale=q.global_scale)
    with pytest.raises(ConfigError, match="packed codes"):
        guided_qdq(x, low, q.scales, bits=2, **args)
    with pytest.raises(ConfigError, match="scales"):
        guided_qdq(x, low, q.scales[:, :1], bits=1, **args)
    with pytest.raises(ConfigError, match="rounding"):
        guided_qdq(x, low, q.scales, bits=1, rounding="up", **args)


@jit
def _scaled_kernel(a_ptr, down_ptr, up_ptr, N: tl.constexpr, INTERPRET: tl.constexpr):
    i = tl.arange(0, N)
    down, up = scaled(tl.load(a_ptr + i), INTERPRET)
    tl.store(down_ptr + i, down)
    tl.store(up_ptr + i, up)


def test_products_rounded_down_and_up_are_codes(device):
    """The interpreter's integers, and on a GPU the instructions, against exact arithmetic: all fp16 values to 6 and
    fp32 neighbours of the grid, of small ones too."""
    a = torch.arange(0x4601, dtype=torch.int16).view(torch.float16).float()
    grid = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 1e-20, 2.0**-23, 1e-45])
    inf = torch.tensor(float("inf"))
    a = torch.cat([a, torch.nextafter(grid, -inf), torch.nextafter(grid, inf).clamp(max=6), torch.rand(4096) * 6])
    n = 1 << (len(a) - 1).bit_length()
    a = torch.nn.functional.pad(a, (0, n - len(a))).to(device)
    down, up = torch.empty(2, n, dtype=torch.int32, device=device)
    _scaled_kernel[(1,)](a, down, up, N=n, INTERPRET=INTERPRET)
    exact = a.double() * 2.0**-126
    low, high = (t.view(torch.float32).double() for t in (down, up))
    units = exact * 2.0**149  # below 2^-126 fp32 has this grid, above it the product is exact
    assert torch.equal(low, torch.where(a < 1, units.floor() * 2.0**-149, exact))
    assert torch.equal(high, torch.where(a < 1, units.ceil() * 2.0**-149, exact))


def test_the_assembly_of_one_bit_is_the_rule():
    """Every bracket, by both parities, at its ends, on both sides of its first quarter and within."""
    codes = np.arange(8, dtype=np.uint32)[:, None] << np.uint32(22)
    t = codes + np.array([0, 1, 0x0FFFFF, 0x100000, 0x100001, 0x3FFFFF], np.uint32)
    for up, bit in ((t, 0), (t, 1), (t + np.uint32(1), 0), (t + np.uint32(1), 1)):  # products below 1 are not exact
        (got,) = run(_ONE_BIT.value, 1, t, up, np.full_like(t, bit << 22 | 0x123))
        differs = (t >> np.uint32(22)) % 2 != bit
        near = np.isin(codes >> np.uint32(22), (4, 6)) & (t - codes < 0x100000)
        rounded_up = (up + np.uint32(0x3FFFFF)) & np.uint32(0xFFC00000)
        np.testing.assert_array_equal(got, np.where(differs & ~near, rounded_up, codes))


@pytest.mark.parametrize("g", [2.0**-119, 2.0**-121, 2.0**-126])
def test_global_scales_of_the_largest_numbers(device, rule, g):
    """1/g times 2^7 would overflow from 2^121 on."""
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 2.0**124).bfloat16()
    g = torch.tensor(g)
    q = quantize(x, "nvfp4-exact", global_scale=g)
    y = drifted(x)
    want = guided_round(y, q.codes & 1, q.scales, bits=1, profile="nvfp4-exact", global_scale=g)
    assert want.float().isfinite().all() and (want != 0).any()
    low = pack_low_bits(q.codes, 1).to(device)
    got = guided_qdq(y.to(device), low, q.scales.to(device), bits=1, profile="nvfp4-exact", global_scale=g.to(device))
    assert torch.equal(got.cpu(), want)
