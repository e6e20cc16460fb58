"""Guided rounding over a sorted code table: over E2M1 it is `guided_round`, over E4M3 the definition read literally."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import ConfigError
from tracekit.numerics import guide_by_table, guided_round, guided_round_e4m3, quantize
from tracekit.numerics.formats import E2M1_MAGNITUDES
from tracekit.numerics.guided_table import e4m3_magnitudes

E4M3 = e4m3_magnitudes(torch.device("cpu")).tolist()


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
def test_over_e2m1_it_is_guided_round(bits, rounding):
    at = torch.cat([torch.arange(0, 97) / 16, torch.arange(0, 42) / 7 + 1e-3, torch.tensor([1e-40])])
    inf = torch.tensor(torch.inf)
    z = torch.cat([at, torch.nextafter(at, inf), torch.nextafter(at, -inf)]).clamp(-6, 6)
    z = torch.cat([z, -z])[:, None].expand(-1, 16).contiguous()
    codes = torch.arange(16, dtype=torch.uint8).expand(z.shape).contiguous() & ((1 << bits) - 1)
    one = torch.full((len(z), 1), 0x38, dtype=torch.uint8)
    want = guided_round(z, codes, one, bits=bits, profile="nvfp4-exact", global_scale=1.0, rounding=rounding)
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    got = guide_by_table(z, codes, table, bits=bits, width=4, open_=rounding == "bracket_open")
    assert torch.equal(got.float(), want)


def literal(z, code, bits):
    """The definition with exact comparisons, one value at a time."""
    a = abs(z)
    below, above = max(m for m in E4M3 if m <= a), min(m for m in E4M3 if m >= a)
    if bits == 8:
        target = E4M3[code & 127] * (1 if (code >= 128) == (z < 0) else -1)
    else:
        members = [m for i, m in enumerate(E4M3) if i % (1 << bits) == code % (1 << bits)]
        target = min(members, key=lambda m: (abs(m - a), m not in (below, above), m))
    q = min((below, above), key=lambda m: abs(m - target))
    return -q if z < 0 else q


POINTS = [0.0, 2.0**-10, 2.0**-9, 0.0146, 2.0**-6, 0.3, 1.0, 1.06, 1.0625, 1.19, 15.9, 31.0, 240.0, 433.0, 447.9, 448.0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_over_e4m3_by_definition(bits):
    """docs/concepts/rounding.md, the table rule."""
    codes = [c for c in range(1 << bits) if c & 127 != 127]
    pairs = list(itertools.product([*POINTS, *(-p for p in POINTS[1:])], codes))
    z = torch.tensor([p[0] for p in pairs], dtype=torch.float32)
    c = torch.tensor([p[1] for p in pairs], dtype=torch.uint8)
    table = torch.tensor(E4M3, dtype=torch.float64)
    got = guide_by_table(z, c, table, bits=bits, width=8).tolist()
    want = [literal(a, code, bits) for a, code in zip(z.tolist(), c.tolist(), strict=True)]
    wrong = [(p, g, w) for p, g, w in zip(pairs, got, want, strict=True) if g != w]
    assert not wrong, wrong[:5]


@settings(max_examples=200, deadline=None)
@given(st.floats(-448, 448, width=32), st.integers(0, 255).filter(lambda c: c & 127 != 127))
def test_full_code_is_never_farther_than_nearest(z, code):
    """docs/concepts/rounding.md, P1, over E4M3: |q* - q_roll| <= |rtn(z) - q_roll| with all eight bits."""
    value = torch.tensor([z])
    roll = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
    near = value.to(torch.float8_e4m3fn).double().item()
    table = torch.tensor(E4M3, dtype=torch.float64)
    q = guide_by_table(value, torch.tensor([code], dtype=torch.uint8), table, bits=8, width=8).item()
    assert abs(q - roll) <= abs(near - roll)


@pytest.mark.parametrize("profile", ["mxfp8", "fp8-e4m3"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_same_input_reproduces_the_rollout(profile, bits):
    torch.manual_seed(0)
    x = torch.randn(16, 70) * 3
    q = quantize(x, profile)
    out = guided_round_e4m3(x, q.codes & ((1 << bits) - 1), q.scales, bits=bits, profile=profile)
    assert torch.equal(out, q.dequantize())


def test_refuses():
    x = torch.randn(1, 32)
    q = quantize(x, "mxfp8")
    for kwargs, match in (
        (dict(bits=9, profile="mxfp8"), "1..8"),
        (dict(bits=1, profile="int8"), "mxfp8 and fp8-e4m3"),
        (dict(bits=1, profile="mxfp8", rounding="up"), "rounding"),
    ):
        with pytest.raises(ConfigError, match=match):
            guided_round_e4m3(x, q.codes, q.scales, **kwargs)
