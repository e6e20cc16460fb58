"""The profiles beyond the defaults: eight-bit formats, truncation, odd shapes and special values for all of them."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.numerics import PROFILES, expert_global_scale, fake_quantize, global_scale_for, guided_round, quantize
from tracekit.numerics.eight_bit import round_e4m3, round_half_away

NAMES = sorted(PROFILES)


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (3, 1), (2, 3, 50), (1, 300)])
def test_shapes_gradient_and_round_trip(profile, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    q = quantize(x, profile, amax=4.0)
    assert q.codes.shape == shape and q.codes.dtype == torch.uint8
    y = fake_quantize(x, profile, amax=4.0)
    assert torch.equal(y, q.dequantize())
    y.sum().backward()
    assert (x.grad == 1).all()


@pytest.mark.parametrize("profile", NAMES)
def test_strides_dtypes_and_zeros(profile):
    x = torch.randn(130, 6, generator=torch.Generator().manual_seed(1)).t()
    assert torch.equal(quantize(x, profile, amax=4.0).codes, quantize(x.contiguous(), profile, amax=4.0).codes)
    assert fake_quantize(x.bfloat16(), profile, amax=4.0).dtype == torch.bfloat16
    assert (fake_quantize(torch.zeros(2, 64), profile, amax=1.0) == 0).all()
    assert (fake_quantize(torch.zeros(2, 64), profile, amax=0.0) == 0).all()


@pytest.mark.parametrize("profile", NAMES)
def test_error_is_bounded_by_the_step(profile):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    error = (fake_quantize(x, profile, amax=x.abs().max()) - x).norm() / x.norm()
    bound = {"int8": 0.012, "fp8-e4m3": 0.03, "mxfp8": 0.03, "int8-rtz": 0.025, "fp8-e4m3-rtz": 0.06}.get(profile, 0.15)
    assert bound / 20 < error < bound


def test_int8_is_half_away():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 0.49, 126.4]])
    q = quantize(x, "int8")
    assert q.codes.view(torch.int8).tolist() == [[127, 1, 2, 3, -1, -3, 0, 126]]
    assert q.scales.tolist() == [[1.0]]
    assert quantize(x, "int8-rtz").codes.view(torch.int8).tolist() == [[127, 0, 1, 2, 0, -2, 0, 126]]
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite() & (every.abs() < 1e6)].double()
    assert torch.equal(round_half_away(every), (every.abs() + 0.5).floor() * every.sign())


def test_e4m3_truncation_is_the_largest_not_above():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = every[every.isfinite() & (every >= 0)]
    want = grid[torch.searchsorted(grid, x.clamp(max=448), right=True) - 1]
    assert torch.equal(round_e4m3(x, truncate=True), want)
    assert torch.equal(round_e4m3(-x, truncate=True), -want)


def test_fp8_zero_token_and_saturation():
    x = torch.zeros(2, 32)
    x[1, :3] = torch.tensor([448.0, 1e-3, -500.0])
    q = quantize(x, "fp8-e4m3")
    assert q.scales[0] == 0 and (q.codes[0] == 0).all()
    assert q.codes[1, 2] == 0xFE
    assert quantize(torch.tensor([[float("inf"), 1.0]]), "mxfp8").codes[0, 0] == 0x7E


def test_global_scale_convention():
    """ModelOpt and torchao take the decode scale; the 256 variants a smaller range."""
    assert global_scale_for(10.0, profile="nvfp4-modelopt").item() == (torch.tensor(10.0) / torch.tensor(2688.0)).item()
    assert global_scale_for(10.0, profile="nvfp4-4over6-256").item() == torch.tensor(1536.0).div(10.0).item()
    assert global_scale_for(10.0, profile="nvfp4-torchao", power_of_two=True) == 2.0**-8
    w = torch.randn(2, 4, 16)
    assert torch.equal(
        expert_global_scale(w, profile="nvfp4-torchao"),
        (w.abs().amax((1, 2), keepdim=True)) / torch.tensor(2688.0),
    )


def test_guided_rounding_is_for_e2m1():
    with pytest.raises(ConfigError, match="E2M1"):
        guided_round(torch.randn(1, 32), None, torch.zeros(1, 1), bits=0, profile="int8")
