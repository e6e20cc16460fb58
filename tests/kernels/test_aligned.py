"""The aligned low-bit forward: emulated against the product of codes, gradients, groups."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import aligned_grouped, aligned_linear
from tracekit.kernels.aligned_linear import product
from tracekit.numerics import fake_quantize, profile_info, quantize

W8A8 = ["int8", "int8-rtz", "fp8-e4m3", "fp8-e4m3-rtz"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weight(profile, *shape, dtype=torch.float32, device="cpu"):
    w = (torch.randn(*shape) * torch.exp(torch.randn(*shape[:-1], 1))).to(dtype).to(device)
    p = profile_info(profile)
    q = quantize(w, p, amax=w.abs().max().float()) if p.has_global else quantize(w, p)
    return w, q


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def in_fp32(profile, device, tolerance=1e-6):
    """Bound on a product with fp32 results: Hopper's tensor cores add E4M3 products up with fewer bits than fp32."""
    return 2**-11 if device == "cuda" and profile.startswith("fp8-e4m3") else tolerance


@pytest.mark.parametrize("profile", W8A8)
@pytest.mark.parametrize("rows", [1, 40])
def test_hardware_and_emulated_product_differ_by_rounding_alone(device, profile, rows):
    """Against float64 over the same codes. Scales outside the sum leave the one rounding of the result to bf16 (2^-8 at
    most); emulation rounds both operands as well.
    """
    p = profile_info(profile)
    x = torch.randn(rows, 512, device=device)
    w, q = weight(profile, 48, 512, device=device)
    exact = quantize(x, p).dequantize(torch.float64) @ q.dequantize(torch.float64).t()
    hardware = product(p, x, q.packed, q.scales, None, True)
    assert error(hardware, exact) < in_fp32(profile, device)
    assert error(product(p, x, q.packed, q.scales, None, False), exact) < 1e-5
    xb = x.bfloat16()
    exact = quantize(xb, p).dequantize(torch.float64) @ q.dequantize(torch.float64).t()
    hardware, emulated = (product(p, xb, q.packed, q.scales, None, h) for h in (True, False))
    assert hardware.dtype == emulated.dtype == torch.bfloat16
    assert error(hardware, exact) < 2**-8
    assert error(hardware, exact) < error(emulated, exact) < 2**-8 + error(hardware, exact)
    assert 0 < error(emulated, hardware) < 2**-7


def test_integer_sums_are_exact(device):
    """Under scales of one, and with sums beyond fp16's range."""
    x = torch.randint(-127, 128, (33, 256), device=device).float()
    w = torch.randint(-127, 128, (16, 256), device=device).float()
    x[:, 0] = w[:, 0] = 127
    q = quantize(w, "int8")
    out = product(profile_info("int8"), x, q.packed, q.scales, None, True)
    assert torch.equal(out, (x.double() @ w.double().t()).float())


@pytest.mark.parametrize("profile", ["int8", "fp8-e4m3", "mxfp8", "int4-g128", "nvfp4-exact", "mxfp4-rceil"])
def test_straight_through(device, profile):
    """Value and gradients of x_fake @ w_fake.T; weight-only formats leave the activations alone."""
    p = profile_info(profile)
    x = torch.randn(2, 3, 256, device=device, requires_grad=True)
    w, q = weight(profile, 48, 256, device=device)
    w.requires_grad_()
    out = aligned_linear(x, q.packed, q.scales, profile, master=w, global_scale=q.global_scale)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, w), grad)
    fake_x = fake_quantize(x, p) if p.bits == 8 else x
    want = fake_x @ fake_quantize(w, p, global_scale=q.global_scale).t()
    assert error(out, want) < in_fp32(profile, device)
    for a, b in zip(got, torch.autograd.grad(want, (x, w), grad), strict=True):
        assert a.dtype == b.dtype and error(a, b) < 1e-6
    assert aligned_linear(x, q.packed, q.scales, profile, global_scale=q.global_scale).requires_grad


@pytest.mark.parametrize("profile", ["int8", "fp8-e4m3", "nvfp4-exact"])
def test_groups_are_experts_one_by_one(device, profile):
    """An empty expert among them, forwards and backwards; an expert without rows has gradient zero."""
    x = torch.randn(9, 64, device=device, requires_grad=True)
    w, q = weight(profile, 4, 32, 64, device=device)
    w.requires_grad_()
    ends = torch.tensor([4, 4, 7, 9], dtype=torch.int32, device=device)
    out = aligned_grouped(x, q.packed, q.scales, ends, profile, master=w, global_scale=q.global_scale)
    parts = [
        aligned_linear(x[a:b], q.packed[i], q.scales[i], profile, master=w[i], global_scale=q.global_scale)
        for i, (a, b) in enumerate(((0, 4), (4, 4), (4, 7), (7, 9)))
    ]
    want = torch.cat(parts)
    assert error(out, want) < 1e-6
    grad = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (x, w), grad), torch.autograd.grad(want, (x, w), grad), strict=True):
        assert error(a, b) < 1e-6
        if a.dim() == 3:
            assert (a[1] == 0).all() and (a[0] != 0).any()


def test_global_scale_an_expert(device):
    w = torch.randn(3, 32, 64, device=device)
    g = 2688 / w.abs().amax((1, 2), keepdim=True)
    q = quantize(w, "nvfp4-exact", global_scale=g)
    x = torch.randn(6, 64, device=device)
    ends = torch.tensor([2, 4, 6], dtype=torch.int32, device=device)
    out = aligned_grouped(x, q.packed, q.scales, ends, "nvfp4-exact", global_scale=g)
    want = torch.einsum("etk,enk->etn", x.view(3, 2, 64), q.dequantize()).flatten(0, 1)
    assert error(out, want) < 1e-6


def test_operators(device):
    x = torch.randn(5, 32, device=device, requires_grad=True)
    w, q = weight("int8", 16, 32, device=device)
    w.requires_grad_()
    torch.library.opcheck(torch.ops.tracekit.aligned_linear, (x, w, q.packed, q.scales, None, "int8", False))
    w3, q3 = weight("fp8-e4m3", 2, 16, 32, device=device)
    ends = torch.tensor([1, 5], dtype=torch.int32, device=device)
    args = (x, w3.requires_grad_(), q3.packed, q3.scales, None, ends, "fp8-e4m3", False, False)
    torch.library.opcheck(torch.ops.tracekit.aligned_grouped, args)


def test_no_rows_and_refusals(device):
    _, q = weight("int8", 16, 32, device=device)
    x = torch.randn(5, 32, device=device)
    assert aligned_linear(x[:0], q.packed, q.scales, "int8").shape == (0, 16)
    with pytest.raises(ConfigError, match="must be u8"):
        aligned_linear(x[:, :16], q.packed, q.scales, "int8")
    with pytest.raises(ConfigError, match="master"):
        aligned_linear(x, q.packed, q.scales, "int8", master=torch.randn(32, 16))
    with pytest.raises(ConfigError, match="ends"):
        aligned_grouped(x, q.packed[None], q.scales[None], torch.tensor([5], device=device), "int8")
