"""docs/concepts/rounding.md: each property stated there, and its pictures, which a script draws."""

import importlib.util
import re
from pathlib import Path

import pytest
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


def drawn():
    """(bits, code) -> columns of the page's pictures, 49 marks each."""
    pictures, bits = {}, 0
    for line in (CONCEPTS / "rounding.md").read_text().splitlines():
        if head := re.match(r"(\d) bits? +z:", line):
            bits = int(head[1])
        elif row := re.match(r"q_roll +(\S+) +([#=.]{49})$", line):
            q = float(row[1])
            pictures[bits, draw.MAGNITUDES.index(abs(q)) + (8 if q < 0 else 0)] = row[2]
    assert sorted(pictures) == [(b, c) for b in (1, 2, 3) for c in range(16) if c != 8]
    return pictures


def everywhere():
    """z in [0, 8]: every fp16 value, and every multiple of a quarter with an fp32 ulp on either side."""
    half = torch.arange(0x4801, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    edge, inf = torch.arange(1, 29) / 4, torch.tensor(float("inf"))
    return torch.cat([half, edge, torch.nextafter(edge, inf), torch.nextafter(edge, -inf)])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_p2_holds_and_fails_exactly_as_drawn(bits, sign):
    """P2: on all pairs of z and code. Code 8 is q_roll = 0 like code 0; four bits have no picture because of P1."""
    z, pages = everywhere(), drawn()
    at = z.clamp(max=6) * 4
    column = (2 * at.floor() + (at != at.floor())).long()
    codes = range(16) if sign > 0 else [c ^ 8 for c in range(16)]
    for code, found in enumerate(draw.farther(bits, codes, sign * z)):
        marks = pages.get((bits, code % 16 if code != 8 else 0), "." * 49)
        want = torch.tensor([m == "#" for m in marks])[column]
        assert torch.equal(found, want), (code, z[found != want][:5])


def test_p2_what_is_said_of_the_pictures():
    """P2, the points under them: marks outside the brackets, how far, equal signs, more bits for opposite ones."""
    apart = {1: [], 2: []}
    for (bits, code), marks in drawn().items():
        q = draw.MAGNITUDES[code & 7]
        for i, mark in enumerate(marks):
            inside = code < 8 and draw.bounds(q, draw.COLUMNS[i])
            assert (mark == "=") == inside  # so no # has the place of a =
        failing = [i for i, m in enumerate(marks) if m == "#"]
        if code < 8 and bits < 3:
            within = [i for i, m in enumerate(marks) if m == "="]
            apart[bits] += [min(abs(draw.COLUMNS[i] - draw.COLUMNS[j]) for j in within) for i in failing]
        if code < 8 and bits == 3:
            assert not failing
        if code > 8:
            assert failing
    assert min(apart[1]) == 1 / 4  # middles of intervals on either side of a grid value
    assert min(apart[2]) == 3 / 8  # 15/4, a quarter below the bracket whose first middle is 33/8


@examples
@given(st.sampled_from(GRID), codes, st.integers(0, 4))
def test_p2_on_the_grid(z, code, bits):
    """P2, fourth point: q* = rtn(z) = z."""
    assert guided(z, code, bits) == guided(z, code, 0) == z


@examples
@given(values, codes, st.integers(0, 4))
def test_p3_an_end_of_the_bracket(z, code, bits):
    """P3: q* is always one, which is why q_roll must be."""
    assert guided(z, code, bits) in bracket(z)


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
