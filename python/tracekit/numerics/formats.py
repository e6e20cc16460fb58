"""Element and scale formats: E2M1, E4M3, E8M0, and the packing of two E2M1 codes into a byte.

An E2M1 code is `sign << 3 | magnitude`; magnitudes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. Code 8 is minus zero.
Everything here works on the bits of fp32: one rounding means the same on every device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

MAGNITUDE_BITS = 0x7FFFFFFF
SIGN_BIT = -0x80000000
INFINITY_BITS = 0x7F800000
_ONE = 0x3F800000
# 1.5 * 2^22 times the value's own power of two: adding it leaves an fp32 whose last bit weighs one E2M1 step.
_MAGIC = (22 << 23) | 0x400000


@functools.lru_cache(maxsize=512, typed=True)
def constant(value: int | float, device: torch.device) -> Tensor:
    """A zero-dimensional int32 or fp32 tensor. On small tensors it halves the cost of an operation with a number."""
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _table(name: str, device: torch.device) -> Tensor:
    if name == "e2m1":
        values = [*E2M1_MAGNITUDES, *(-v for v in E2M1_MAGNITUDES)]
        return torch.tensor(values, dtype=torch.float32, device=device)
    if name == "e4m3":
        values = [(m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)]
        values[127] = float("nan")
        return torch.tensor([*values, *(-v for v in values)], dtype=torch.float32, device=device)
    if name == "e8m0":
        return torch.tensor([*(2.0 ** (b - 127) for b in range(255)), float("nan")], dtype=torch.float32, device=device)
    if name == "e8m0_inverse":
        return torch.tensor([*(2.0 ** (127 - b) for b in range(255)), float("nan")], dtype=torch.float32, device=device)
    raise KeyError(name)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` for a one-dimensional table; index_select is several times faster than indexing on a CPU."""
    if index.dtype == torch.uint8:
        index = index.to(torch.int32)
    return torch.index_select(table, 0, index.reshape(-1)).view(index.shape)


def e2m1_decode(codes: Tensor) -> Tensor:
    """fp32 values of E2M1 codes (u8, any shape; only the low four bits may be set)."""
    return look_up(_table("e2m1", codes.device), codes)


def e4m3_decode(scales: Tensor) -> Tensor:
    """fp32 values of E4M3 bytes (finite-only variant: 0x7F and 0xFF are NaN)."""
    return look_up(_table("e4m3", scales.device), scales)


def e4m3_encode_positive(value: Tensor) -> Tensor:
    """E4M3 bytes of fp32 values >= 0: round to nearest, ties to even, saturating at 448 (infinity too).

    The clamp comes first because casts disagree above 448: torch before 2.12 and ml_dtypes give NaN there.
    """
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e8m0_decode(scales: Tensor) -> Tensor:
    """fp32 values 2^(byte - 127) of E8M0 bytes; 255 is NaN."""
    return look_up(_table("e8m0", scales.device), scales)


def e8m0_inverse(scales: Tensor) -> Tensor:
    """2^(127 - byte), the exact reciprocal of an E8M0 scale; byte 254 gives the subnormal 2^-127."""
    return look_up(_table("e8m0_inverse", scales.device), scales)


def pack_codes(codes: Tensor) -> Tensor:
    """Two four-bit codes a byte, element 2j in the low nibble: u8 [..., K] -> u8 [..., ceil(K/2)].

    An odd K leaves the last high nibble zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    if codes.numel() == 0:
        return codes.new_zeros(*codes.shape[:-1], codes.shape[-1] // 2)
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_codes(packed: Tensor, length: int) -> Tensor:
    """Inverse of `pack_codes`: u8 [..., ceil(length/2)] -> u8 [..., length]."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return pairs.flatten(-2)[..., :length]


def round_e2m1(y: Tensor, *, ties: str = "even", with_codes: bool = False) -> tuple[Tensor, Tensor | None]:
    """Round fp32 `y` to E2M1, saturating at 6; infinities saturate. `y` must hold no NaN, and is overwritten.

    `ties="even"` sends a midpoint to the even code (0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4,
    5 -> 4); `"away"` sends it away from zero; `"down"` towards zero. Returns fp32 values (a negative value that
    rounds to zero comes back as +0) and, if asked, u8 codes (which keep its sign: code 8).
    """
    dev = y.device
    y.clamp_(-E2M1_MAX, E2M1_MAX)
    bits = y.view(torch.int32)
    if ties == "away":  # an odd last bit puts a midpoint above itself and no other value across one
        y = bits.bitwise_or(constant(1, dev)).view(torch.float32)
    elif ties == "down":
        magnitude = bits.bitwise_and(constant(MAGNITUDE_BITS, dev)).sub_(1).clamp_(min=0).bitwise_or_(1)
        y = magnitude.bitwise_or_(bits.bitwise_and(constant(SIGN_BIT, dev))).view(torch.float32)
    exponent = y.view(torch.int32).bitwise_and(constant(INFINITY_BITS, dev)).clamp_(min=_ONE)
    if not with_codes:
        magic = exponent.add_(constant(_MAGIC, dev)).view(torch.float32)
        return y.add_(magic).sub_(magic), None
    magic = exponent.add(constant(_MAGIC, dev))
    shifted = y + magic.view(torch.float32)
    values = shifted - magic.view(torch.float32)
    # With n the multiple of the step 2^(e-1), the code is |n| + 2e. The exponent field >> 22 is 254 + 2e.
    codes = shifted.view(torch.int32).sub_(magic).abs_().add_(exponent.bitwise_right_shift_(constant(22, dev)))
    sign = bits.bitwise_right_shift(constant(28, dev)).bitwise_and_(constant(8, dev))
    return values, codes.add_(constant(2, dev)).bitwise_and_(constant(7, dev)).bitwise_or_(sign).to(torch.uint8)
