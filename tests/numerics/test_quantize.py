"""Block quantisers: against torchao and a scalar reading of their definition, special values, shapes, gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import ConfigError
from tracekit.numerics import (
    dequantize,
    expert_global_scale,
    fake_quantize,
    global_scale_for,
    profile_info,
    quantize,
    quantize_dequantize,
    token_global_scale,
)

NAMES = ["kv-mx16", "mxfp4-rceil", "nvfp4-exact"]
NAN, INF = float("nan"), float("inf")
F = np.float32


def values_of(x, profile, **scale):
    values, codes, scales = quantize_dequantize(x, profile, **scale)
    q = quantize(x, profile, **scale)
    assert torch.equal(codes, q.codes) and torch.equal(scales, q.scales)
    assert torch.equal(values, q.dequantize())
    assert torch.equal(values, fake_quantize(x, profile, **scale))
    return q


def sample(kind, rows=64, k=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g)
    if kind == "heavy":
        x = x / torch.rand(rows, k, generator=g).clamp(min=0.01)
    if kind == "wide":
        x = x * 2.0 ** torch.randint(-20, 12, (rows, k // 16, 1), generator=g).repeat(1, 1, 16).view(rows, k)
    if kind == "integers":
        x = torch.randint(-7, 8, (rows, k), generator=g).float()
    if kind == "powers":
        x = x.sign() * 2.0 ** torch.randint(-10, 8, (rows, k), generator=g)
    return x


KINDS = ["normal", "heavy", "wide", "integers", "powers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_rceil_equals_torchao(kind, dtype):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = sample(kind, rows=128, k=256).to(dtype)
    scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    q = quantize(x, "mxfp4-rceil")
    assert torch.equal(q.scales, scales.view(torch.uint8))
    assert torch.equal(q.packed, packed.view(torch.uint8))


def test_mxfp4_rceil_differs_from_torchao_just_above_a_boundary():
    """A named difference: torchao takes log2 in fp32 and loses a last bit above 6 * 2^k; we read the exponent."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = torch.zeros(1, 32)
    x[0, 0] = float(np.nextafter(F(6 * 2**20), F(INF)))
    assert quantize(x, "mxfp4-rceil").scales.item() == 148
    theirs, _ = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    assert theirs.view(torch.uint8).item() == 147


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def nearest(v, table):
    """Index of the table entry next to v >= 0, ties to the even index; distances are exact in fp64."""
    distance = np.abs(np.minimum(np.asarray(v, np.float64), table[-1])[..., None] - table)
    tied = distance == distance.min(-1, keepdims=True)
    return np.argmax(tied * (2 - np.arange(len(table)) % 2), -1)


def defined_nvfp4(x, g):
    """nvfp4-exact read off its definition in numpy: codes and scale bytes, flat lists."""
    with np.errstate(over="ignore", divide="ignore"):
        x = np.asarray(x, F).reshape(-1, 16)
        byte = nearest(np.abs(x).max(-1) * F(F(g) * F(1 / 6)), E4M3)
        inverse = np.minimum(F(1) / (E4M3[byte].astype(F) * F(F(1) / F(g))), np.finfo(F).max)
        z = x * inverse[:, None]
    codes = nearest(np.abs(z), GRID) | np.where(np.signbit(z), 8, 0)
    return codes.ravel().tolist(), byte.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_exact_equals_its_definition(kind):
    x = sample(kind, rows=8, k=64).bfloat16()
    for amax in (x.float().abs().max().item(), 1.015625, 3.3):
        g = global_scale_for(amax).item()
        codes, scales = defined_nvfp4(x.float().numpy(), g)
        q = values_of(x, "nvfp4-exact", global_scale=g)
        assert q.scales.flatten().tolist() == scales
        assert q.codes.flatten().tolist() == codes


def test_nvfp4_exact_over_every_bf16():
    """All finite bf16 values as a tensor of 4 080 blocks, and each value alone in a block of its own."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite()]
    for x in (every.view(-1, 16), torch.nn.functional.pad(every.view(-1, 1), (0, 15))[::7]):
        codes, scales = defined_nvfp4(x.numpy(), 1.0)
        q = values_of(x.contiguous(), "nvfp4-exact", global_scale=1.0)
        assert q.scales.flatten().tolist() == scales
        assert q.codes.flatten().tolist() == codes


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(min_value=2.0**-60, max_value=2.0**60, width=32),
)
def test_nvfp4_exact_equals_its_definition_anywhere(values, g):
    padded = values + [0.0] * (-len(values) % 16)
    codes, scales = defined_nvfp4(np.array(padded, F), g)
    q = quantize(torch.tensor(values), "nvfp4-exact", global_scale=g)
    assert q.scales.tolist() == scales
    assert q.codes.tolist() == codes[: len(values)]


def test_kv_mx16_by_definition():
    """Scale exponent ceil(log2(max(amax / 6, 1e-10))), thresholds half up, no minus zero from an exact zero."""
    x = torch.zeros(6, 16)
    x[0, :8] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])
    x[0, 8:] = -x[0, :8]
    x[1, :3] = torch.tensor([6.25, -0.0, -1e-9])
    x[2, 0] = 1e-30
    x[4, 0], x[5, 0] = 96.0, 6 * 2.0**-33
    q = values_of(x, "kv-mx16")
    assert q.scales.flatten().tolist() == [127, 128, 94, 94, 131, 94]
    assert q.codes[0].tolist() == [7, 7, 6, 5, 4, 3, 2, 1, 15, 15, 14, 13, 12, 11, 10, 9]
    assert q.codes[1, :3].tolist() == [5, 0, 8]
    assert q.codes[2].tolist() == [0] * 16 and q.codes[5, 0] == 7


MUTATIONS = {
    "amax/6 first": lambda am, g: (am / F(6)) * g,
    "g last": lambda am, g: g * (am * F(1 / 6)),
    "divide by decode scale": lambda am, g: am / (F(6) * (F(1) / g)),
    "g/6 by division": lambda am, g: am * (g / F(6)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_order_of_operations_matters(name):
    """Each reordering of the scale chain changes a byte of blocks one can check by hand (amax 6: 4.5; amax 14: 12.5
    and 11.5) or of ordinary bf16 data."""
    differs = 0
    for amax, by_hand in ((6.0, [4.5]), (14.0, [12.5, 11.5]), (3.0, [2.5]), (0.1, []), (1.7, [])):
        block = torch.cat([torch.tensor(by_hand), torch.rand(4000).bfloat16().float() * amax]).bfloat16().float()
        g = global_scale_for(amax)
        ours = quantize(torch.nn.functional.pad(block[:, None], (0, 15)), "nvfp4-exact", global_scale=g).scales[:, 0]
        mutated = torch.from_numpy(MUTATIONS[name](block.numpy(), F(g.item()))).clamp(max=448)
        differs += (ours != mutated.to(torch.float8_e4m3fn).view(torch.uint8)).sum().item()
    assert differs > 0


@pytest.mark.parametrize("profile", NAMES)
def test_special_values(profile):
    p = profile_info(profile)
    x = torch.zeros(6, p.block)
    x[0, :3] = torch.tensor([3.0, NAN, 1.0])
    x[1, :3] = torch.tensor([3.0, INF, -INF])
    x[2, :3] = torch.tensor([1.0, -0.0, -1e-12])
    x[4, 0] = -NAN
    x[5, :2] = torch.tensor([-2.0, NAN])
    clean = x.clone()
    clean[x.isnan()] = 0
    q, ref = values_of(x, profile, global_scale=64.0), quantize(clean, profile, global_scale=64.0)
    assert q.codes[0, 1] == 7 and q.codes[5, 1] == 7  # NaN is +6
    assert torch.equal(q.scales, ref.scales)  # and the block maximum ignores it
    same = ~x.isnan()
    assert torch.equal(q.codes[same], ref.codes[same])
    assert q.codes[1, 1] == 7 and q.codes[1, 2] == 15
    assert q.scales[1] == (0x7E if p.scale_format == "e4m3" else 254)
    assert q.codes[2, 1] == (8 if p.keeps_minus_zero else 0)
    assert q.codes[2, 2] == 8
    assert q.scales[3] == (94 if profile == "kv-mx16" else 0) and (q.codes[3] == 0).all()
    assert q.dequantize()[[0, 2, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("byte", range(1, 8))
def test_subnormal_block_scales(byte):
    """Scale bytes 0x01..0x07 mean byte * 2^-9: quantised under that value, and decoded to it."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -3.0, 1.5, 0.5]) * byte * 2.0**-9
    q = values_of(x, "nvfp4-exact", global_scale=1.0)
    assert q.scales.item() == byte
    assert q.codes[0, :4].tolist() == [7, 13, 3, 1]
    assert torch.equal(q.dequantize(), x)


def test_scale_that_underflows_gives_zero():
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6 * 2.0**-10, -(2.0**-10)])
    q = values_of(x, "nvfp4-exact", global_scale=1.0)
    assert q.scales.item() == 0 and q.codes[0, :3].tolist() == [7, 15, 0]
    assert (q.dequantize() == 0).all()


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("k", [1, 5, 15, 17, 48, 63])
def test_partial_block_is_as_if_padded_with_zeros(profile, k):
    x = sample("normal", rows=4, k=96)[:, :k]
    q = values_of(x, profile, amax=4.0)
    p = profile_info(profile)
    nb = -(-k // p.block)
    padded = quantize(torch.nn.functional.pad(x, (0, nb * p.block - k)), profile, amax=4.0)
    assert q.codes.shape == (4, k) and q.scales.shape == (4, nb) and q.packed.shape == (4, (k + 1) // 2)
    assert torch.equal(q.codes, padded.codes[:, :k]) and torch.equal(q.scales, padded.scales)


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (2, 0, 48)])
def test_empty(profile, shape):
    q = quantize(torch.zeros(shape), profile, amax=1.0)
    assert q.codes.shape == shape and q.scales.shape[:-1] == shape[:-1]
    assert q.dequantize().shape == shape and q.packed.numel() == 0
    x = torch.zeros(shape, requires_grad=True)
    fake_quantize(x, profile, amax=1.0).sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("profile", NAMES)
def test_strides_dtypes_and_leading_axes(profile):
    x = sample("heavy", rows=6, k=96)
    q = quantize(x, profile, amax=40.0)
    assert torch.equal(quantize(x.t().contiguous().t(), profile, amax=40.0).codes, q.codes)
    assert torch.equal(quantize(x.view(2, 3, 96), profile, amax=40.0).codes, q.codes.view(2, 3, 96))
    assert torch.equal(quantize(x.repeat(1, 2)[:, :96], profile, amax=40.0).scales, q.scales)
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        got = values_of(low, profile, amax=40.0)
        assert torch.equal(got.codes, quantize(low.float(), profile, amax=40.0).codes)
        assert fake_quantize(low, profile, amax=40.0).dtype == dtype
        assert got.dequantize(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("profile", NAMES)
def test_large_tensors_are_the_sum_of_their_rows(profile):
    x = sample("normal", rows=3000, k=96)
    q = values_of(x, profile, amax="token")
    scale = None if q.global_scale is None else q.global_scale[2990:]
    tail = quantize(x[2990:], profile, global_scale=scale)
    assert torch.equal(q.codes[2990:], tail.codes) and torch.equal(q.scales[2990:], tail.scales)


def test_inputs_are_not_written():
    for profile in NAMES:
        x = sample("normal", rows=4)
        before = x.clone()
        q = quantize(x, profile, amax=3.0)
        values_of(x, profile, amax=3.0)
        codes = q.codes.clone()
        q.dequantize()
        assert torch.equal(x, before) and torch.equal(codes, q.codes)


@pytest.mark.parametrize("profile", NAMES)
def test_idempotent_on_its_own_output(profile):
    """Quantising a dequantised block again changes nothing when the block holds its maximum (code 7)."""
    q = quantize(sample("normal", rows=32), profile, global_scale=64.0)
    again = quantize(q.dequantize(), profile, global_scale=64.0)
    full = (q.codes.view(32, -1, profile_info(profile).block) & 7).amax(-1) == 7
    assert full.any()
    assert torch.equal(again.scales[full], q.scales[full])
    assert torch.equal(
        again.dequantize()[full.repeat_interleave(profile_info(profile).block, -1)],
        q.dequantize()[full.repeat_interleave(profile_info(profile).block, -1)],
    )


def test_global_scale():
    assert global_scale_for(2688.0) == 1 and global_scale_for(0.0) == 1 and global_scale_for(NAN) == 1
    assert global_scale_for(INF) == 1
    assert global_scale_for(1e-38) == torch.finfo(torch.float32).max
    assert global_scale_for(10.0).item() == F(2688) / F(10)
    assert global_scale_for(10.0, power_of_two=True) == 256
    assert global_scale_for(10.0, headroom=4.0, power_of_two=True) == 64
    rows = torch.tensor([[6.0, -8.0], [0.0, 0.0], [NAN, 1.0]])
    assert token_global_scale(rows).flatten().tolist() == [336.0, 1.0, 2688.0]


def test_gate_and_up_share_one_scale():
    gate, up, down = torch.randn(3, 8, 32), torch.randn(3, 8, 32), torch.randn(3, 32, 8)
    up[1, 2, 3] = 10.0
    g = expert_global_scale(gate, up, profile="nvfp4-exact")
    assert g.shape == (3, 1, 1) and g[1].item() == F(2688) / F(10)
    assert torch.equal(g, expert_global_scale(up, gate, profile="nvfp4-exact"))
    for e in range(3):
        alone = quantize(gate[e], "nvfp4-exact", global_scale=g[e].item())
        assert torch.equal(quantize(gate, "nvfp4-exact", global_scale=g).codes[e], alone.codes)
    assert expert_global_scale(down, profile="mxfp4-rceil") is None
    with pytest.raises(ConfigError, match="one E"):
        expert_global_scale(gate, torch.randn(2, 8, 32), profile="nvfp4-exact")


def test_rows_do_not_depend_on_their_batch():
    x = sample("heavy", rows=16)
    whole = quantize(x, "nvfp4-exact", amax="token")
    alone = quantize(x[3:4], "nvfp4-exact", amax="token")
    assert torch.equal(whole.codes[3:4], alone.codes) and torch.equal(whole.scales[3:4], alone.scales)
    with pytest.raises(ConfigError, match="global scale"):
        quantize(x, "nvfp4-exact")
    with pytest.raises(ConfigError, match="token"):
        quantize(x, "nvfp4-exact", amax="tensor")


def test_dequantize_order():
    """(q * s) * fl(1/g), in that order: the other order differs in the last bit."""
    q = quantize(sample("normal"), "nvfp4-exact", global_scale=768.1)
    s = q.scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    values = dequantize(q.codes, torch.full_like(q.scales, 0x38), "nvfp4-exact", 1.0)
    decode = torch.tensor(1.0) / torch.tensor(768.1)
    assert torch.equal(q.dequantize(), (values * s) * decode)
    assert not torch.equal(q.dequantize(), values * (s * decode))
