"""Guided rounding: the rollout's low bits choose between the two neighbours of the trainer's value (TRACE, Alg. 1).

For one value, with z = clip(x/s, -6, 6) under the *rollout's* scale s and c the low `bits` bits of its code:

    q_hat    = sgn(z) * argmin over magnitudes m with low_bits(code(m)) = c of |m - |z||      (Reconstruct)
    (q-, q+) = the grid values next to z on either side                                       (BracketFP4)
    q*       = argmin over {q-, q+} of |q - q_hat|;       out = s q*, straight-through gradient

A tie in Reconstruct goes to the candidate inside the bracket, else to the smaller magnitude. With 4 bits q_hat is the
signed codeword. With 0 bits only the scale is shared: z is rounded to nearest. On a grid value (saturation included)
the bracket is that value alone; `bracket_open` makes it {z, its neighbour towards q_hat}.

The whole rule depends on |z| only through its sign, exponent, top three mantissa bits and whether any lower bit is
set, because every grid point and every class midpoint has at most four significant bits. So it is one table look-up.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.numerics.formats import E2M1_MAGNITUDES, MAGNITUDE_BITS, SIGN_BIT, constant, look_up, round_e2m1
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import fake_quantize, from_blocks, piece_of, row_pieces, straight_through, to_blocks
from tracekit.numerics.scales import resolve_global_scale

_SIX = 0x40C00000
_SHIFT = 20  # sign, exponent and three mantissa bits stay
_CELLS = 2 * (_SIX >> _SHIFT) + 1


def low_bits(codes: Tensor, bits: int) -> Tensor:
    """The low `bits` (1..4) bits of E2M1 codes, u8: what a record keeps. Bit 3 is the sign."""
    _check_bits(bits, lowest=1)
    return codes & ((1 << bits) - 1)


def guided_round(
    x: Tensor,
    codes: Tensor | None,
    scales: Tensor,
    *,
    bits: int,
    profile: str | Profile,
    global_scale: Tensor | float | None = None,
    rounding: str = "bracket",
) -> Tensor:
    """Quantise-dequantise x [..., K] under the rollout's record; x's dtype, gradient 1 with respect to x only.

    `codes` u8 [..., K] hold each element's low `bits` bits (ignored for `bits=0`), `scales` u8 [..., ceil(K/block)]
    and `global_scale` (the encode scale) are the rollout's. A block whose scale byte is the profile's
    `missing_scale` has no record: it is rounded to nearest under its own scale. NaN becomes +6 s.
    """
    p = profile_info(profile)
    _check_bits(bits)
    if p.bits != 4 or p.scale_format == "fp32":
        raise ConfigError(f"guided rounding is defined over E2M1 codes, not for {p.name}")
    if rounding not in ("bracket", "bracket_open"):
        raise ConfigError(f"rounding must be bracket or bracket_open, not {rounding!r}")
    g = resolve_global_scale(x, p, None, global_scale)
    if x.numel() == 0:
        return straight_through(x, torch.empty_like(x))
    with torch.no_grad():
        pieces = row_pieces(x)
        if pieces:
            k, open_ = x.shape[-1], rounding == "bracket_open"
            rows, scale_rows = x.detach().reshape(-1, k), scales.reshape(-1, scales.shape[-1])
            code_rows = codes.reshape(-1, k) if bits else None
            parts = [
                _guided(rows[i], code_rows[i] if bits else None, scale_rows[i], bits, p, piece_of(g, x, i), open_)
                for i in pieces
            ]
            out = torch.cat(parts).view(x.shape)
        else:
            out = _guided(x.detach(), codes, scales, bits, p, g, rounding == "bracket_open")
    return straight_through(x, out)


def _guided(
    x: Tensor, codes: Tensor | None, scales: Tensor, bits: int, p: Profile, g: Tensor | None, open_: bool
) -> Tensor:
    xb = to_blocks(x.to(torch.float32), p.block)
    value = p.scale_value(scales)
    z = p.normalise(xb, scales, value, g).nan_to_num_(nan=6.0, posinf=6.0, neginf=-6.0)
    if bits == 0:
        q, _ = round_e2m1(z, ties=p.ties)
    else:
        q = _guide(z, to_blocks(codes, p.block), bits, open_)
    out = from_blocks(p.denormalise(q, value, g), x.shape[-1]).to(x.dtype)
    return _fill_missing(out, x, scales, p, g)


def _guide(z: Tensor, codes: Tensor, bits: int, open_: bool) -> Tensor:
    if open_:
        z.add_(0.0)  # sgn(-0) is +
    dev = z.device
    shift = constant(_SHIFT, dev)
    bits_of_z = z.view(torch.int32)
    magnitude = bits_of_z.bitwise_and(constant(MAGNITUDE_BITS, dev))
    if bits == 4:  # bit 3 of the index says whether the signs differ
        codes = bits_of_z.bitwise_right_shift(constant(28, dev)).bitwise_and_(constant(8, dev)).bitwise_xor_(codes)
    magnitude.clamp_(max=_SIX)
    cell = magnitude.bitwise_right_shift(shift)  # twice the floor, plus one if bits below were set
    cell.add_(magnitude.add_(constant((1 << _SHIFT) - 1, dev)).bitwise_right_shift_(shift))
    q = look_up(_rule_table(bits, open_, dev), cell.bitwise_left_shift_(constant(bits, dev)).bitwise_or_(codes))
    return q.view(torch.int32).bitwise_xor_(bits_of_z.bitwise_and_(constant(SIGN_BIT, dev))).view(torch.float32)


@functools.lru_cache(maxsize=64)
def _rule_table(bits: int, open_: bool, device: torch.device) -> Tensor:
    """q* relative to the sign of z, for every cell of |z| and every low-bit pattern: fp32 [_CELLS << bits]."""
    rows: list[float] = []
    cache: dict[tuple[float, bool], list[float]] = {}
    for cell in range(_CELLS):
        a = torch.tensor((cell // 2) << _SHIFT, dtype=torch.int32).view(torch.float32).item()
        inside = bool(cell % 2)
        if inside:  # any point of the open cell; below 0.25 all cells are alike
            a = 0.125 if a < 0.25 else a * (1 + 2.0**-10)
        if (a, inside) not in cache:
            cache[a, inside] = [_rule(a, c, bits, open_) for c in range(1 << bits)]
        rows += cache[a, inside]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _rule(a: float, c: int, bits: int, open_: bool) -> float:
    """q* for z = a >= 0 and low bits c; with 4 bits, c's bit 3 set means that q_hat is negative."""
    grid = E2M1_MAGNITUDES
    below = max(m for m in grid if m <= a)
    above = min(m for m in grid if m >= a)
    if bits == 4:
        target = -grid[c & 7] if c & 8 else grid[c]
    else:
        candidates = [m for i, m in enumerate(grid) if i & ((1 << bits) - 1) == c]
        target = min(candidates, key=lambda m: (abs(m - a), m not in (below, above), m))
    if open_ and below == above != target:
        towards = [m for m in (*grid, *(-m for m in grid)) if (m - a) * (target - a) > 0]
        above = min(towards, key=lambda m: abs(m - a))
    return min((below, above), key=lambda q: abs(q - target))


def _fill_missing(out: Tensor, x: Tensor, scales: Tensor, p: Profile, g: Tensor | float | None) -> Tensor:
    missing = scales == p.missing_scale
    concrete = type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if concrete and x.device.type == "cpu" and not missing.any():
        return out
    own = fake_quantize(x.detach(), p, global_scale=g)
    mask = missing.repeat_interleave(p.block, dim=-1)[..., : x.shape[-1]]
    return torch.where(mask, own, out)


def _check_bits(bits: int, lowest: int = 0) -> None:
    if not lowest <= bits <= 4:
        raise ConfigError(f"bits must be {lowest}..4, not {bits}")
