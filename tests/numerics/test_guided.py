"""Guided rounding against a brute-force reading of Algorithm 1, and the outputs worked out by hand from the paper."""

import itertools

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.numerics import fake_quantize, guided_round, low_bits, profile_info, quantize

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GRID = sorted({s * m for m in MAGNITUDES for s in (1, -1)})
UNIT = 0x38  # E4M3 one; with g = 1 the scale is exactly 1


def code_of(q):
    return MAGNITUDES.index(abs(q)) | (8 if q < 0 else 0)


def guide(z, q_roll, bits, rounding="bracket"):
    """guided_round of single values under scale one: z and q_roll are lists."""
    x = torch.zeros(len(z), 16)
    codes = torch.zeros(len(z), 16, dtype=torch.uint8)
    x[:, 0] = torch.tensor(z)
    codes[:, 0] = torch.tensor([code_of(q) for q in q_roll], dtype=torch.uint8)
    scales = torch.full((len(z), 1), UNIT, dtype=torch.uint8)
    kept = low_bits(codes, bits) if bits else None
    out = guided_round(x, kept, scales, bits=bits, profile="nvfp4-exact", global_scale=1.0, rounding=rounding)
    return out[:, 0].tolist()


def brute(z, q_roll, bits, open_=False):
    """The definition, one value at a time, in Python floats."""
    z = max(-6.0, min(6.0, z))
    sign = -1.0 if z < 0 else 1.0
    below, above = max(g for g in GRID if g <= z), min(g for g in GRID if g >= z)
    code = code_of(q_roll)
    if bits == 0:
        return sign * min(MAGNITUDES, key=lambda m: (abs(m - abs(z)), MAGNITUDES.index(m) % 2))
    if bits == 4:
        q_hat = q_roll
    else:
        mask = (1 << bits) - 1
        members = [sign * m for i, m in enumerate(MAGNITUDES) if i & mask == code & mask]
        q_hat = min(members, key=lambda q: (abs(abs(q) - abs(z)), q not in (below, above), abs(q)))
    if open_ and below == above and q_hat != z:
        step = 1 if q_hat > z else -1
        above = GRID[GRID.index(z) + step]
    return min((below, above), key=lambda q: abs(q - q_hat))


# z, q_roll, then nearest, full, and 1, 2, 3 bits.
WORKED = [
    (2.51, 2, 3, 2, 2, 2, 2),
    (2.40, 2, 2, 2, 2, 2, 2),
    (2.99, 2, 3, 2, 2, 2, 2),
    (2.01, 3, 2, 3, 2, 3, 3),
    (-2.51, -2, -3, -2, -2, -2, -2),
    (0.30, 0, 0.5, 0, 0, 0, 0),
    (0.20, 0.5, 0, 0.5, 0.5, 0.5, 0.5),
    (1.20, 1.5, 1, 1.5, 1.5, 1.5, 1.5),
    (5.9, 4, 6, 4, 4, 4, 4),
    (4.6, 6, 4, 6, 6, 6, 6),
    (4.2, 6, 4, 6, 4, 6, 6),
    (2.10, 3, 2, 3, 2, 3, 3),
    (2.30, 3, 2, 3, 3, 3, 3),
    (1.80, 3, 2, 2, 1.5, 2, 2),
    (3.6, 2, 4, 3, 4, 3, 3),
    (1.1, 3, 1, 1.5, 1.5, 1, 1.5),
    (0.20, -0.5, 0, 0, 0.5, 0.5, 0.5),
    (6.7, 4, 6, 6, 6, 6, 6),
]


@pytest.mark.parametrize("row", WORKED, ids=lambda r: f"{r[0]}-{r[1]}")
def test_worked_examples(row):
    z, q_roll, nearest, full, one, two, three = row
    got = [guide([z], [q_roll], bits)[0] for bits in (0, 4, 1, 2, 3)]
    assert got == [nearest, full, one, two, three]


def test_paper_figure_4():
    """60.24 in the trainer, 59.76 in the rollout, scale 24: 48 against 48, where rounding to nearest gives 72."""
    scales = torch.tensor([[0x5C]], dtype=torch.uint8)  # 24
    x = torch.zeros(1, 16)
    x[0, 0] = 60.24
    codes = torch.zeros(1, 16, dtype=torch.uint8)  # the low bit of code 4 (value 2)
    common = dict(profile="nvfp4-exact", global_scale=1.0)
    assert guided_round(x, codes, scales, bits=1, **common)[0, 0] == 48
    assert guided_round(x, None, scales, bits=0, **common)[0, 0] == 72


@pytest.mark.parametrize("bits", range(5))
@pytest.mark.parametrize("rounding", ["bracket", "bracket_open"])
def test_every_cell_and_code(bits, rounding):
    """All grid points, midpoints and class midpoints, one fp32 step either side of each, a fine sweep, both signs."""
    if bits == 0 and rounding == "bracket_open":
        pytest.skip("no codes, no bracket")
    points = [k / 16 for k in range(0, 120)] + [k / 7 + 1e-3 for k in range(0, 50)] + [1e-40, 1e-30, 1e30]
    at = torch.tensor(points)
    inf = torch.tensor(float("inf"))
    sweep = torch.cat([at, torch.nextafter(at, inf), torch.nextafter(at, -inf)])
    z = [v for v in torch.cat([sweep, -sweep]).tolist()]
    pairs = list(itertools.product(z, GRID))
    got = guide([a for a, _ in pairs], [q for _, q in pairs], bits, rounding)
    expected = [brute(a, q, bits, rounding == "bracket_open") for a, q in pairs]
    wrong = [(p, g, e) for p, g, e in zip(pairs, got, expected, strict=True) if g != e]
    assert not wrong, wrong[:5]


def test_one_bit_differs_from_full_where_stated():
    """With q_roll in the bracket: 2 and 3 bits always agree with full information; 1 bit fails exactly for
    |z| in (2, 2.25) with |q_roll| = 3 and |z| in (4, 4.5) with |q_roll| = 6."""
    z = [k / 1000 for k in range(-6000, 6001)]
    pairs = [(a, q) for a in z for q in GRID if q in (max(g for g in GRID if g <= a), min(g for g in GRID if g >= a))]
    args = [a for a, _ in pairs], [q for _, q in pairs]
    full, one, two, three = (guide(*args, bits) for bits in (4, 1, 2, 3))
    assert full == two == three
    for (a, q), f, o in zip(pairs, full, one, strict=True):
        stated = (2 < abs(a) < 2.25 and abs(q) == 3) or (4 < abs(a) < 4.5 and abs(q) == 6)
        assert (f != o) == stated, (a, q)


FAR_SIDE = {
    0: [(0.5, 0.75)],
    0.5: [(1, 1.25)],
    1: [(0.25, 0.5), (1.5, 1.75)],
    1.5: [(0.75, 1), (2.25, 2.5)],
    2: [(1.25, 1.5), (3, 3.5)],
    3: [(1.75, 2), (4.5, 5)],
    4: [(2.5, 3)],
    6: [(3.5, 4)],
}


def test_one_bit_fails_on_the_far_side_of_the_nearest():
    """q_roll next to RTN(z) but outside the bracket: one bit picks the wrong neighbour on these intervals and, with
    the in-bracket ones, nowhere else."""
    z = [k / 1000 for k in range(1, 6000)]
    grid = MAGNITUDES
    pairs = []
    for a in z:
        r = grid.index(brute(a, 0, 0))
        pairs += [(a, grid[i]) for i in (r - 1, r, r + 1) if 0 <= i < 8]
    args = [a for a, _ in pairs], [q for _, q in pairs]
    full, one = guide(*args, 4), guide(*args, 1)
    for (a, q), f, o in zip(pairs, full, one, strict=True):
        if a in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 2.25, 4.5) or a in grid:
            continue  # ends of the intervals: ties of the nearest, or a degenerate bracket
        far = any(lo < a < hi for lo, hi in FAR_SIDE[q])
        near = (2 < a < 2.25 and q == 3) or (4 < a < 4.5 and q == 6)
        assert (f != o) == (far or near), (a, q, f, o)


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_input_reproduces_the_rollout(profile, bits, dtype):
    """docs/concepts/rounding.md, P6: guided by its own record, a value rounds to the rollout's (saturated ones too)."""
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.rand(64, 1).exp() * 3).to(dtype)
    q = quantize(x, profile, amax=20.0)
    codes = low_bits(q.codes, bits) if bits else None
    out = guided_round(x, codes, q.scales, bits=bits, profile=profile, global_scale=q.global_scale)
    assert torch.equal(out, q.dequantize()) and out.dtype == dtype


def test_gradient_is_one_for_x_only():
    x = torch.randn(4, 32, requires_grad=True)
    q = quantize(x, "nvfp4-exact", amax=4.0)
    weight = torch.randn(4, 32)
    out = guided_round(
        x * 1, low_bits(q.codes, 1), q.scales, bits=1, profile="nvfp4-exact", global_scale=q.global_scale
    )
    (out * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    x.grad = None
    (fake_quantize(x * 100, "nvfp4-exact", amax=4.0) * weight).sum().backward()  # saturated: still identity
    assert torch.equal(x.grad, weight * 100)


@pytest.mark.parametrize("profile", ["nvfp4-exact", "mxfp4-rceil", "kv-mx16"])
def test_missing_blocks_round_under_their_own_scale(profile):
    p = profile_info(profile)
    x = torch.randn(3, 2 * p.block)
    q = quantize(x * 3, profile, amax=10.0)
    scales = q.scales.clone()
    scales[1] = p.missing_scale
    out = guided_round(x, low_bits(q.codes, 1), scales, bits=1, profile=profile, global_scale=q.global_scale)
    own = fake_quantize(x, profile, global_scale=q.global_scale)
    assert torch.equal(out[1], own[1])
    assert not torch.equal(out[0], own[0])
    assert out.isfinite().all()


def test_zero_block_of_the_rollout_gives_zero():
    x = torch.randn(2, 16)
    zero = torch.zeros(2, 1, dtype=torch.uint8)
    out = guided_round(x, torch.ones(2, 16, dtype=torch.uint8), zero, bits=1, profile="nvfp4-exact", global_scale=1.0)
    assert (out == 0).all()


def test_partial_block_per_token_scale_and_strides():
    x = torch.randn(20, 5).t()  # [5, 20]: one full and one partial block, not contiguous
    q = quantize(x, "nvfp4-exact", amax="token")
    assert q.global_scale.shape == (5, 1)
    args = dict(bits=1, profile="nvfp4-exact")
    whole = guided_round(x, low_bits(q.codes, 1), q.scales, global_scale=q.global_scale, **args)
    assert whole.shape == (5, 20)
    for i in range(5):
        row = guided_round(x[i], low_bits(q.codes[i], 1), q.scales[i], global_scale=q.global_scale[i].item(), **args)
        assert torch.equal(row, whole[i])
    assert guided_round(x[:, :0], q.codes[:, :0], q.scales[:, :0], global_scale=1.0, **args).shape == (5, 0)


def test_wrong_arguments():
    x, s = torch.randn(1, 16), torch.full((1, 1), UNIT, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="bits"):
        guided_round(x, None, s, bits=5, profile="nvfp4-exact", global_scale=1.0)
    with pytest.raises(ConfigError, match="rounding"):
        guided_round(x, None, s, bits=0, profile="nvfp4-exact", global_scale=1.0, rounding="up")
    with pytest.raises(ConfigError, match="known: "):
        guided_round(x, None, s, bits=0, profile="nvfp4", global_scale=1.0)
    with pytest.raises(ConfigError, match="global scale"):
        guided_round(x, None, s, bits=0, profile="nvfp4-exact")
