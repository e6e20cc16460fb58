"""E2M1, E4M3 and E8M0 against ml_dtypes, exact fractions and all 65 536 bf16 values."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.numerics import e2m1_decode, e4m3_decode, e8m0_decode, pack_codes, unpack_codes
from tracekit.numerics.formats import E2M1_MAGNITUDES, e4m3_encode_positive, e8m0_inverse, round_e2m1

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
FINITE = ALL_BF16[~ALL_BF16.isnan()]
INF = torch.tensor(float("inf"))
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def around(points):
    both = torch.cat([points, torch.nextafter(points, INF), torch.nextafter(points, -INF)])
    return torch.cat([both, -both])


def nearest_by_fractions(y, ties):
    """Code of the grid value next to y, in exact arithmetic."""
    if abs(y) == float("inf"):
        return 7 | (8 if y < 0 else 0)
    exact = abs(Fraction(y))
    order = {"even": lambda i: i % 2, "away": lambda i: -i, "down": lambda i: i}[ties]
    code = min(range(8), key=lambda i: (abs(Fraction(E2M1_MAGNITUDES[i]) - exact), order(i)))
    return code | (8 if np.signbit(np.float32(y)) else 0)


def test_every_bf16_equals_ml_dtypes():
    values, codes = round_e2m1(FINITE.clone(), with_codes=True)
    theirs = FINITE.numpy().astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(codes.numpy(), theirs.view(np.uint8) & 15)
    assert np.array_equal(values.numpy(), theirs.astype(np.float32))
    assert torch.equal(values, e2m1_decode(codes))


@pytest.mark.parametrize("ties", ["even", "away", "down"])
def test_midpoints_and_their_neighbours_by_fractions(ties):
    y = torch.cat([around(MIDPOINTS), around(torch.tensor(E2M1_MAGNITUDES)), torch.tensor([1e-45, 1e30, 3e38, -1e-38])])
    values, codes = round_e2m1(y.clone(), ties=ties, with_codes=True)
    assert codes.tolist() == [nearest_by_fractions(v, ties) for v in y.tolist()]
    assert torch.equal(values, e2m1_decode(codes))
    assert torch.equal(round_e2m1(y.clone(), ties=ties)[0], values)


@given(st.floats(width=32, allow_nan=False), st.sampled_from(["even", "away", "down"]))
def test_any_fp32_by_fractions(y, ties):
    _, codes = round_e2m1(torch.tensor([y]), ties=ties, with_codes=True)
    assert codes.item() == nearest_by_fractions(y, ties)


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_monotone_odd_and_idempotent(a, b):
    lo, hi = sorted((a, b))
    q = round_e2m1(torch.tensor([lo, hi, -hi]))[0]
    assert q[0] <= q[1] and q[2] == -q[1]
    assert torch.equal(round_e2m1(q.clone())[0], q)


def test_e4m3_every_bf16_equals_ml_dtypes():
    positive = FINITE[FINITE >= 0]
    ours = e4m3_encode_positive(positive).numpy()
    theirs = np.minimum(positive.numpy(), 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(ours, theirs)
    assert e4m3_encode_positive(INF.view(1)).item() == 0x7E


def test_e4m3_ties_by_fractions():
    table = e4m3_decode(torch.arange(127, dtype=torch.uint8)).double()
    middle = ((table[1:] + table[:-1]) / 2).float()
    got = e4m3_encode_positive(torch.cat([middle, torch.nextafter(middle, INF), torch.nextafter(middle, -INF)]))
    code = torch.arange(126)
    even = torch.where(code % 2 == 0, code, code + 1)
    assert got.tolist() == [*even.tolist(), *(code + 1).tolist(), *code.tolist()]


def test_scale_tables_equal_ml_dtypes():
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(e4m3_decode(every).numpy(), theirs, equal_nan=True)
    theirs = every.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(e8m0_decode(every).numpy(), theirs, equal_nan=True)
    product = e8m0_decode(every[:255]).double() * e8m0_inverse(every[:255]).double()
    assert (product == 1).all()


@pytest.mark.parametrize("k", [0, 1, 2, 7, 16, 33])
def test_pack_is_undone_by_unpack(k):
    codes = torch.randint(0, 16, (3, 2, k), dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (3, 2, (k + 1) // 2)
    assert torch.equal(unpack_codes(packed, k), codes)
    if k > 1:
        assert torch.equal(packed[..., 0], codes[..., 0] | codes[..., 1] << 4)
    if k % 2:
        assert torch.equal(packed[..., -1], codes[..., -1])


def test_pack_takes_strided_codes():
    codes = torch.randint(0, 16, (6, 5), dtype=torch.uint8).t()
    assert torch.equal(pack_codes(codes), pack_codes(codes.contiguous()))
