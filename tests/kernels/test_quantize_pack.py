"""Quantise + pack + low bits against the PyTorch reference, byte for byte."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import pack_low_bits, quantize_pack, quantize_pack_into, unpack_low_bits
from tracekit.kernels.quantize_pack import KERNEL_PROFILES
from tracekit.numerics import profile_info, quantize

PROFILES = list(KERNEL_PROFILES)
QUICK = ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"]  # the others run the same body: their sweeps are long


def with_long(profiles):
    return [p if p in QUICK else pytest.param(p, marks=pytest.mark.long) for p in profiles]


def scale_for(profile, g):
    """The global scale that the profile takes: the encode scale g, or the decode scale 1/g."""
    return 1 / g if profile_info(profile).decode_global else g


def check(x, profile, g, bits):
    packed, scales, low, values = quantize_pack(x, profile, global_scale=g, bits=bits, with_values=True)
    ref = quantize(x.cpu(), profile, global_scale=None if g is None else g.cpu())
    assert torch.equal(scales.cpu(), ref.scales)
    assert torch.equal(packed.cpu(), ref.packed)
    assert torch.equal(values.cpu(), ref.dequantize())
    if bits:
        assert torch.equal(low.cpu(), pack_low_bits(ref.codes, bits))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "dtype, bits",
    [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 4), (torch.float32, 0)],
)
def test_equals_reference(device, profile, dtype, bits, hard_rows):
    x = hard_rows(dtype=dtype).to(device)
    for g in (torch.tensor(448.3), torch.rand(48, 1) * 300 + 1):
        check(x, profile, scale_for(profile, g).to(device), bits)


@pytest.mark.parametrize("profile", with_long(PROFILES))
@pytest.mark.parametrize("g", [1.0, 2.0**-120, 3.7e4])
def test_every_bf16(device, profile, g, every_bf16):
    check(every_bf16.to(device), profile, scale_for(profile, torch.tensor(g, device=device)), 1)


@pytest.mark.parametrize("profile", PROFILES)
def test_midpoints_and_one_step_either_side(device, profile):
    mid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    inf = torch.tensor(float("inf"))
    y = torch.cat([torch.tensor([6.0]), mid, torch.nextafter(mid, inf), torch.nextafter(mid, -inf)])
    x = torch.zeros(3, 32)
    x[:, : len(y)] = y * torch.tensor([[1.0], [-1.0], [2.0**-6]])
    check(x.to(device), profile, torch.tensor(1.0, device=device), 2)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_quotient_that_underflows(device, profile):
    """Beside the largest numbers, the smallest over their scale is zero: with its sign or without, by the profile."""
    x = torch.tensor([3e38, 1e-40, -1e-40, 1.0, -1.0, 0.0, -0.0, -3e38]).repeat(4)[None].bfloat16().to(device)
    check(x, profile, scale_for(profile, torch.tensor(2.0**-118, device=device)), 4)


def test_one_scale_an_expert(device):
    w = torch.randn(3, 5, 32).bfloat16().to(device)
    check(w, "nvfp4-exact", torch.tensor([10.0, 200.0, 3000.0], device=device).view(3, 1, 1), 1)


@pytest.mark.parametrize("profile", QUICK)
def test_writes_the_callers_buffers_and_nothing_else(device, profile, hard_rows):
    """Poisoned buffers come out whole; the rows before and after a slice of a larger buffer stay as they were."""
    p = profile_info(profile)
    x = hard_rows(rows=33)[8:].to(device)
    ref = quantize(x.cpu(), profile, global_scale=64.0)

    def buffer(width):
        return torch.full((27, width), 0xAB, dtype=torch.uint8, device=device)

    packed, scales, low = buffer(32), buffer(64 // p.block), buffer(8)
    quantize_pack_into(
        x,
        profile,
        global_scale=torch.tensor(64.0, device=device),
        packed=packed[1:26],
        scales=scales[1:26],
        low=low[1:26],
        bits=1,
    )
    for got, want in ((packed, ref.packed), (scales, ref.scales), (low, pack_low_bits(ref.codes, 1))):
        assert torch.equal(got[1:26].cpu(), want)
        assert (got[[0, 26]] == 0xAB).all()


def test_strided_and_empty_input(device):
    x = torch.randn(64, 10, device=device).t()
    check(x, "nvfp4-exact", torch.tensor(100.0, device=device), 1)
    check(torch.zeros(0, 32, device=device), "nvfp4-exact", torch.tensor(1.0, device=device), 1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 8, 13, 64])
def test_low_bits_pack_and_unpack(bits, k):
    codes = torch.randint(0, 16, (3, k), dtype=torch.uint8)
    packed = pack_low_bits(codes, bits)
    assert packed.shape == (3, -(-k * bits // 8))
    assert torch.equal(unpack_low_bits(packed, bits, k), codes & ((1 << bits) - 1))
    stream = sum(int(c) % (1 << bits) << (bits * j) for j, c in enumerate(codes[0]))
    assert packed[0].tolist() == list(stream.to_bytes(packed.shape[1], "little"))


def test_refuses_what_it_cannot_take(device):
    x = torch.randn(2, 32, device=device)
    with pytest.raises(ConfigError, match="no kernel quantises int8"):
        quantize_pack(x, "int8")
    with pytest.raises(ConfigError, match="needs a global scale"):
        quantize_pack(x, "nvfp4-exact")
    with pytest.raises(ConfigError, match="packed must be"):
        empty = torch.empty(2, 2, dtype=torch.uint8, device=device)
        quantize_pack_into(x, "nvfp4-exact", global_scale=torch.tensor(1.0), packed=empty, scales=empty)


def test_meta_and_schema():
    """Shapes propagate without running (as torch.compile needs), and the schema says what is written."""
    x = torch.randn(4, 32)
    buffers = [torch.empty(4, n, dtype=torch.uint8) for n in (16, 2, 4)]
    args = (x, "nvfp4-exact", torch.tensor(3.0), *buffers, None, 1)
    torch.library.opcheck(torch.ops.tracekit.quantize_pack, args, test_utils=("test_schema", "test_faketensor"))
