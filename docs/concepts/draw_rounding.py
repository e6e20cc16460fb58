"""Prints the pictures of rounding.md: where low bits bring guided rounding no farther from the rollout than nearest.

python docs/concepts/draw_rounding.py
"""

import torch

from tracekit.numerics import guided_round

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CELLS = [k / 4 + 1 / 8 for k in range(24)]  # every boundary of the rule is a multiple of a quarter


def outcome(z: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """q* of z [N] under rollout codes [N] at scale one."""
    scales = torch.full((len(z), 1), 0x38, dtype=torch.uint8)
    x, c = torch.zeros(len(z), 16), torch.zeros(len(z), 16, dtype=torch.uint8)
    x[:, 0], c[:, 0] = z, codes & ((1 << bits) - 1)
    return guided_round(x, c, scales, bits=bits, profile="nvfp4-exact", global_scale=1.0)[:, 0]


def farther(bits: int, codes: range) -> torch.Tensor:
    """bool [codes, cells]: |q* - q_roll| > |nearest(z) - q_roll|."""
    z = torch.tensor(CELLS).repeat(len(codes))
    c = torch.tensor(codes, dtype=torch.uint8).repeat_interleave(len(CELLS))
    roll = torch.tensor(MAGNITUDES)[(c & 7).long()] * (1 - 2 * (c >> 3).float())
    excess = (outcome(z, c, bits) - roll).abs() - (outcome(z, c, 0) - roll).abs()
    return (excess > 0).view(len(codes), -1)


def picture(bits: int) -> str:
    """One row a rollout value, one column a quarter of z; `#` farther than nearest, `=` q_roll bounds the bracket."""
    lines = [f"{bits} bit{'s' if bits > 1 else ''}".ljust(11) + "z: 0   1   2   3   4   5   6"]
    for code, row in zip(range(8), farther(bits, range(8)).tolist(), strict=True):
        inside = [any(min(a, b) <= z <= max(a, b) for a, b in neighbours(code)) for z in CELLS]
        cells = "".join("#" if f else "=" if i else "." for f, i in zip(row, inside, strict=True))
        lines.append(f"q_roll {MAGNITUDES[code]:<4}   {cells}")
    return "\n".join(lines)


def neighbours(code: int) -> list[tuple[float, float]]:
    """The brackets that MAGNITUDES[code] bounds."""
    m = MAGNITUDES
    return [(m[i], m[i + 1]) for i in (code - 1, code) if 0 <= i < 7]


def opposite() -> str:
    """Cells of z > 0 at which a negative rollout value is farther than under nearest, by bits."""
    parts = []
    for bits in (1, 2, 3, 4):
        bad = farther(bits, range(9, 16))
        parts.append(f"{bits}: {int(bad.sum())} of {bad.numel()}")
    return "z > 0 > q_roll, cells farther, by bits: " + ", ".join(parts)


def text() -> str:
    """All of it."""
    return "\n\n".join([*(picture(b) for b in (1, 2, 3, 4)), opposite()])


if __name__ == "__main__":
    print(text())
