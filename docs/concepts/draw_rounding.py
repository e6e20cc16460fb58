"""Prints the pictures of rounding.md: where low bits bring guided rounding no farther from the rollout than nearest.

python docs/concepts/draw_rounding.py
"""

import torch

from tracekit.numerics import guided_round

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
COLUMNS = [k / 8 for k in range(49)]  # multiples of a quarter, each followed by the middle of the interval after it
HEADER = "z:" + "".join(f"{unit:<8}" for unit in range(7)).rstrip()


def outcome(z: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """q* of z [N] under rollout codes [N] at scale one."""
    n = len(z)
    x, c = (torch.nn.functional.pad(t, (0, -n % 16)).view(-1, 16) for t in (z, codes & ((1 << bits) - 1)))
    scales = torch.full((len(x), 1), 0x38, dtype=torch.uint8)
    return guided_round(x, c, scales, bits=bits, profile="nvfp4-exact", global_scale=1.0).flatten()[:n]


def value_of(codes: torch.Tensor) -> torch.Tensor:
    """Rollout values of codes."""
    return torch.tensor(MAGNITUDES)[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())


def farther(bits: int, codes: range, z: list[float] | torch.Tensor = COLUMNS) -> torch.Tensor:
    """bool [codes, z]: |q* - q_roll| > |nearest(z) - q_roll|."""
    z = torch.as_tensor(z)
    every = z.repeat(len(codes))
    c = torch.tensor(codes, dtype=torch.uint8).repeat_interleave(len(z))
    roll = value_of(c)
    excess = (outcome(every, c, bits) - roll).abs() - (outcome(every, c, 0) - roll).abs()
    return (excess > 0).view(len(codes), -1)


def bounds(q: float, z: float) -> bool:
    """Whether q is an end of z's bracket, z >= 0."""
    return q in (max(m for m in MAGNITUDES if m <= z), min(m for m in MAGNITUDES if m >= z))


def picture(bits: int) -> str:
    """One row a rollout value; `#` farther than nearest, `=` q_roll bounds the bracket."""
    lines = [f"{bits} bit{'s' if bits > 1 else ''}".ljust(12) + HEADER]
    codes = [*range(8), *range(9, 16)]
    for code, row in zip(codes, farther(bits, codes).tolist(), strict=True):
        q = value_of(torch.tensor(code)).item()
        cells = ("#" if f else "=" if bounds(q, z) else "." for f, z in zip(row, COLUMNS, strict=True))
        lines.append(f"q_roll {q:>4}   " + "".join(cells))
    return "\n".join(lines)


def text() -> str:
    """All of it."""
    return "\n\n".join(picture(b) for b in (1, 2, 3))


if __name__ == "__main__":
    print(text())
