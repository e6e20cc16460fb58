"""The Rust quantisers (`tracekit._core`) equal the PyTorch reference byte for byte, under every profile."""

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit import _core
from tracekit.errors import ConfigError
from tracekit.numerics import (
    PROFILES,
    dequantize,
    global_scale_for,
    guided_round,
    low_bits,
    quantize,
    quantize_dequantize,
)

ROOT = Path(__file__).parent.parent.parent
E2M1 = [p for p in PROFILES.values() if p.bits == 4 and p.scale_format != "fp32"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = [1.0, 448.0, 0.26879999, 26853.7754, 2.6122448444366455, 1e-3]
BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def scale_of(x, p, amax=None):
    """A static global scale that fits x, or None."""
    if not p.has_global:
        return None
    finite = x.float().abs()
    amax = finite[finite.isfinite()].max() if amax is None else amax
    return global_scale_for(amax, profile=p)


def rust(x, p, g=None, bits=0):
    """(codes, scales, low) of `quantize_pack` as tensors."""
    packed, scales, low = _core.quantize_pack(x, p.name, global_scale=g, bits=bits)
    rows = x.shape[:-1]
    packed = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.zeros(0, dtype=torch.uint8)
    kind = torch.float32 if p.scale_format == "fp32" else torch.uint8
    scales = torch.frombuffer(scales, dtype=kind) if scales else torch.zeros(0, dtype=kind)
    nb = -(-x.shape[-1] // (p.block or max(x.shape[-1], 1)))
    width = -(-x.shape[-1] // 2) if p.bits == 4 else x.shape[-1]
    return packed.view(*rows, width), scales.view(*rows, nb), low


def bits_of(t):
    """Comparable bits of floats: all NaN are one."""
    if t.dtype == torch.uint8:
        return t
    t = torch.where(t.isnan(), torch.nan, t)
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def assert_equal(x, p, g=None):
    """Codes, scales, low bits, dequantised and quantise-dequantised values of x are the reference's."""
    ours, scales, _ = rust(x, p, g)
    theirs = quantize(x, p, global_scale=g)
    assert torch.equal(bits_of(scales), bits_of(theirs.scales)), p.name
    assert torch.equal(ours, theirs.packed), p.name
    out = torch.empty_like(x)
    _core.dequantize(ours, scales, p.name, out, global_scale=g)
    assert torch.equal(bits_of(out), bits_of(theirs.dequantize())), p.name
    _core.quantize_dequantize(x, p.name, out, global_scale=g)
    assert torch.equal(bits_of(out), bits_of(quantize_dequantize(x, p, g)[0])), p.name


def heavy(rows, k, seed=0):
    """Ordinary, wide, heavy-tailed and coarse rows."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=gen)
    x[1::4] *= torch.exp2(torch.randint(-20, 12, (len(x[1::4]), k), generator=gen).float())
    x[2::4] /= torch.randn(len(x[2::4]), k, generator=gen).abs() + 0.01
    x[3::4] = (x[3::4] * 8).round() / 2
    return x


@pytest.mark.parametrize("p", PROFILES.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_types(p, dtype):
    for k in (1, 15, 48, 129, 1041):
        x = heavy(8, k, seed=k).to(dtype)
        assert_equal(x, p, scale_of(x, p))


@pytest.mark.parametrize("p", PROFILES.values(), ids=lambda p: p.name)
def test_all_bf16_values(p):
    """Alone in a block, and beside a block maximum that puts them anywhere on the grid; NaN and infinities included."""
    alone = BF16.view(-1, 1)
    beside = torch.cat([BF16.view(-1, 8), torch.full((8192, 1), 6.0, dtype=BF16.dtype)], -1)
    together = BF16.view(-1, 256)
    cases = [(alone, 448.0), *((x, g) for x in (beside, together) for g in SCALES)]
    for x, g in cases if p.has_global else [(alone, None), (beside, None), (together, None)]:
        ours, scales, _ = rust(x, p, g)
        theirs = quantize(x, p, global_scale=g)
        assert torch.equal(bits_of(scales), bits_of(theirs.scales))
        assert torch.equal(ours, theirs.packed)


@pytest.mark.parametrize("p", [p for p in E2M1 if p.has_global], ids=lambda p: p.name)
def test_midpoints_under_every_block_scale(p):
    """Each E4M3 scale with the seven boundaries, one fp32 ulp up and down, of both signs."""
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([boundaries, boundaries.nextafter(torch.tensor(9.0)), boundaries.nextafter(torch.tensor(0.0))])
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for g in SCALES:
        points = torch.cat([near, -near, torch.zeros(3)]).view(3, 15)
        x = torch.cat([torch.full((3, 1), 6.0), points], -1) * scales[:, None, None]
        x = (x / g if not p.decode_global else x * (1 / g)).flatten(1)
        assert_equal(x, p, 1 / g if p.decode_global else g)


@pytest.mark.parametrize("p", PROFILES.values(), ids=lambda p: p.name)
def test_special_tensors(p):
    inf, nan = float("inf"), float("nan")
    rows = torch.zeros(8, 160)
    rows[1, :4] = torch.tensor([nan, -nan, 1.0, -0.0])
    rows[2, 16:20] = torch.tensor([inf, -1.0, nan, 3.0])
    rows[3, ::3] = -0.0
    rows[4, :8] = torch.tensor([1e-40, -1e-44, 1e-38, 1.2e-38, -3e-39, 0.0, -0.0, 1e-45])
    rows[5, :3] = torch.tensor([3.4e38, -3.4e38, 1.0])
    rows[6] = nan
    rows[7, 32:48] = -torch.arange(16.0)
    for dtype in DTYPES:
        for g in (1.0, 448.0, 1e-3) if p.has_global else (None,):
            assert_equal(rows.to(dtype), p, g)


@pytest.mark.parametrize("p", [p for p in E2M1 if p.has_global], ids=lambda p: p.name)
def test_subnormal_and_saturated_scales(p):
    x = heavy(8, 64, seed=3)
    for amax in (1e-3, 0.1, 1e3, 1e7, 1e30):
        assert_equal(x, p, scale_of(x, p, amax=torch.tensor(amax)))


@pytest.mark.parametrize("p", E2M1, ids=lambda p: p.name)
def test_a_quotient_that_underflows(p):
    x = torch.tensor([3e38, 1e-40, -1e-40, 1.0, -1.0, 0.0, -0.0, -3e38]).repeat(4)[None].bfloat16()
    assert_equal(x, p, scale_of(x, p))


@pytest.mark.parametrize("p", [p for p in PROFILES.values() if p.has_global], ids=lambda p: p.name)
def test_global_scale_by_row_and_by_expert(p):
    x = heavy(6, 48, seed=5).bfloat16()
    g = global_scale_for(x.float().abs().amax(-1, keepdim=True), profile=p)
    assert_equal(x, p, g)
    assert_equal(x.view(2, 3, 48), p, g.view(2, 3, 1)[:, :1].contiguous())
    assert_equal(x.view(2, 3, 48), p, g.view(2, 3, 1)[:1].contiguous())


@pytest.mark.parametrize("p", E2M1, ids=lambda p: p.name)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_low_bits_of_the_same_pass(p, bits):
    """Element j at bits [b j, b j + b) of its row, least significant first; rows padded to a byte."""
    for k in (1, 7, 33, 64, 530):
        x = heavy(5, k, seed=bits).bfloat16()
        g = scale_of(x, p)
        codes = quantize(x, p, global_scale=g).codes
        _, _, low = rust(x, p, g, bits)
        wanted = np.unpackbits(low_bits(codes, bits).numpy()[..., None], axis=-1, bitorder="little")[..., :bits]
        wanted = np.packbits(wanted.reshape(5, -1), axis=-1, bitorder="little")
        assert bytes(low) == wanted.tobytes()


@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
@pytest.mark.parametrize("p", E2M1, ids=lambda p: p.name)
def test_guided_rounding(p, rounding):
    """Against the reference, for every width, with blocks that have no record, packed and unpacked."""
    for k, dtype in ((64, torch.bfloat16), (530, torch.float32), (33, torch.float16)):
        x = heavy(8, k, seed=k)
        record = quantize(x, p, global_scale=scale_of(x, p))
        x = (x * (1 + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))).to(dtype)
        x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        g, scales = record.global_scale, record.scales.clone()
        scales[::3, 0] = p.missing_scale
        for bits in range(5):
            codes = low_bits(record.codes, bits) if bits else None
            want = guided_round(x, codes, scales, bits=bits, profile=p, global_scale=g, rounding=rounding)
            out = torch.empty_like(x)
            args = dict(bits=bits, global_scale=g, rounding=rounding)
            _core.guided_round(x, codes, scales, p.name, out, packed=False, **args)
            assert torch.equal(bits_of(out), bits_of(want)), (k, bits)
            if bits:
                source = dequantize(record.codes, record.scales, p, g)
                _, _, low = rust(source, p, g, bits)
                again = quantize(source, p, global_scale=g).codes
                want = guided_round(
                    x, low_bits(again, bits), scales, bits=bits, profile=p, global_scale=g, rounding=rounding
                )
                _core.guided_round(x, low, scales, p.name, out, **args)
                assert torch.equal(bits_of(out), bits_of(want)), (k, bits)


values = st.one_of(
    st.floats(width=32),
    st.floats(-8, 8, width=32),
    st.builds(
        lambda m, e: m * 2.0**e, st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]), st.integers(-9, 9)
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(values, min_size=1, max_size=70),
    st.floats(2.0**-10, 2.0**14, width=32),
    st.sampled_from(DTYPES),
    st.sampled_from(list(PROFILES.values())),
)
def test_any_values(row, g, dtype, p):
    x = torch.tensor([row], dtype=torch.float64).to(dtype)
    assert_equal(x, p, g if p.has_global else None)


def test_buffers_of_numpy_and_writes_in_place():
    x = heavy(4, 48)
    p = PROFILES["nvfp4-exact"]
    want = quantize(x, p, global_scale=3.0)
    for source, dtype in ((x.numpy(), None), (x.bfloat16().view(torch.uint16).numpy(), "bf16")):
        packed, scales = np.zeros((4, 24), np.uint8), torch.zeros(4, 3, dtype=torch.uint8)
        low = np.zeros((4, 6), np.uint8)
        got = _core.quantize_pack(
            source, p.name, global_scale=3.0, bits=1, dtype=dtype, packed=packed, scales=scales, low=low
        )
        assert got[0] is packed and got[1] is scales and got[2] is low
        if dtype is None:
            assert (packed == want.packed.numpy()).all() and torch.equal(scales, want.scales)
        else:
            assert (packed == quantize(x.bfloat16(), p, global_scale=3.0).packed.numpy()).all()


def test_empty_tensors():
    for p in PROFILES.values():
        for shape in ((0, 32), (3, 0), (0,)):
            packed, scales, low = _core.quantize_pack(torch.zeros(shape), p.name, global_scale=1.0)
            assert len(packed) == len(scales) == 0 and low is None


def test_wrong_arguments():
    x = torch.zeros(4, 32)
    with pytest.raises(ConfigError, match="nvfp4-exact needs a global scale"):
        _core.quantize_pack(x, "nvfp4-exact")
    with pytest.raises(ConfigError, match="known: nvfp4-exact"):
        _core.quantize_pack(x, "nvfp4", global_scale=1.0)
    with pytest.raises(ConfigError, match="low bits"):
        _core.quantize_pack(x, "int8", bits=1)
    with pytest.raises(ValueError, match="contiguous"):
        _core.quantize_pack(x.T, "mxfp4-rceil")
    with pytest.raises(ValueError, match="contiguous"):
        _core.quantize_pack(x.numpy().T, "mxfp4-rceil")
    with pytest.raises(ValueError, match="packed has 3 elements"):
        _core.quantize_pack(x, "mxfp4-rceil", packed=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="share memory"):
        _core.quantize_dequantize(x, "mxfp4-rceil", x)
    with pytest.raises(ValueError, match="read-only"):
        _core.quantize_pack(x, "mxfp4-rceil", packed=bytes(64))
    with pytest.raises(ValueError, match="no use for elements"):
        _core.quantize_pack(x.double(), "mxfp4-rceil")
    with pytest.raises(ValueError, match='say dtype="bf16" or "fp16"'):
        _core.quantize_pack(np.zeros((2, 32), np.uint16), "mxfp4-rceil")
    with pytest.raises(ValueError, match="global_scale of shape"):
        _core.quantize_pack(x, "nvfp4-exact", global_scale=torch.ones(3, 1))


def test_both_packages_carry_one_reciprocal_table():
    zstandard = pytest.importorskip("zstandard")
    ours = zstandard.ZstdDecompressor().decompress((ROOT / "rust/numerics/data/rcp_sm90.zst").read_bytes())
    theirs = lzma.decompress((ROOT / "python/tracekit/numerics/data/rcp_sm90.xz").read_bytes())
    assert ours == theirs
