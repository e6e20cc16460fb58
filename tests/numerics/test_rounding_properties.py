"""docs/concepts/rounding.md: each property stated there, and its pictures, which a script draws."""

import importlib.util
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.kernels import pack_low_bits, unpack_low_bits

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts"
_spec = importlib.util.spec_from_file_location("draw_rounding", CONCEPTS / "draw_rounding.py")
draw = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(draw)

GRID = sorted({s * m for m in draw.MAGNITUDES for s in (1, -1)})
values = st.one_of(
    st.floats(-6, 6, width=32),
    st.integers(-96, 96).map(lambda k: k / 16),
    st.sampled_from(GRID).flatmap(lambda q: st.sampled_from([q, q + 2.0**-20, q - 2.0**-20])),
).filter(lambda z: -6 <= z <= 6)
codes = st.integers(0, 15)
examples = settings(max_examples=300, deadline=None)


def guided(z, code, bits):
    return draw.outcome(torch.tensor([z], dtype=torch.float32), torch.tensor([code], dtype=torch.uint8), bits).item()


def value_of(code):
    return draw.MAGNITUDES[code & 7] * (-1 if code & 8 else 1)


def bracket(z):
    return max(q for q in GRID if q <= z), min(q for q in GRID if q >= z)


def test_pictures_are_the_pages():
    page = (CONCEPTS / "rounding.md").read_text()
    assert draw.text() in page


@examples
@given(values, codes)
def test_p1_full_information(z, code):
    """P1: four bits are never farther than nearest."""
    q = value_of(code)
    assert abs(guided(z, code, 4) - q) <= abs(guided(z, code, 0) - q)


@examples
@given(values, codes, st.integers(1, 4))
def test_p2_where_q_roll_bounds_the_bracket(z, code, bits):
    """P2, first point: with q_roll an end of the bracket the inequality holds for every number of bits."""
    q = value_of(code)
    if q in bracket(z):
        assert abs(guided(z, code, bits) - q) <= abs(guided(z, code, 0) - q)


@examples
@given(values, codes)
def test_p2_three_bits_and_equal_signs(z, code):
    """P2, second point."""
    q = value_of(code)
    if z * q > 0:
        assert abs(guided(z, code, 3) - q) <= abs(guided(z, code, 0) - q)


@examples
@given(st.integers(0, 23), st.floats(2.0**-10, 1 - 2.0**-10), codes.filter(lambda c: c < 8), st.integers(1, 4))
def test_p2_cells_are_uniform(cell, inside, code, bits):
    """P2: what the picture says of a quarter of z is true throughout it."""
    z = (cell + inside) / 4
    q = value_of(code)
    excess = abs(guided(z, code, bits) - q) > abs(guided(z, code, 0) - q)
    assert excess == draw.farther(bits, range(code, code + 1))[0, cell].item()


@examples
@given(values, codes, st.integers(1, 4))
def test_p3_when_the_codeword_comes_back(z, code, bits):
    """P3, both directions."""
    q = value_of(code)
    excepted = bits == 1 and ((abs(q) == 3 and 2 < abs(z) < 2.25) or (abs(q) == 6 and 4 < abs(z) < 4.5))
    assert (guided(z, code, bits) == q) == (q in bracket(z) and not excepted)


@examples
@given(values, values, codes, st.integers(0, 4))
def test_p4_shape(a, b, code, bits):
    """P4: monotone on either side of zero, sign, saturation, idempotent on the grid."""
    low, high = sorted((a, b))
    if low >= 0 or high < 0:
        assert guided(low, code, bits) <= guided(high, code, bits)
    q = guided(a, code, bits)
    assert q == 0 or (q > 0) == (a > 0)
    assert guided(7 + abs(a), code, bits) == 6 and guided(-7 - abs(a), code, bits) == -6
    assert guided(q, code, bits) == q


@examples
@given(st.lists(st.integers(0, 255), max_size=40), st.integers(1, 8))
def test_p5_unpack_of_pack(row, bits):
    """P5."""
    c = torch.tensor(row, dtype=torch.uint8)
    assert torch.equal(unpack_low_bits(pack_low_bits(c, bits), bits, len(row)), c & ((1 << bits) - 1))
