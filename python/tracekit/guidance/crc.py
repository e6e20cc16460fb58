"""CRC32C (Castagnoli, reflected, as in iSCSI) in numpy, for the reader that needs no native code."""

from functools import cache

import numpy as np

POLY = np.uint32(0x82F63B78)


@cache
def table() -> np.ndarray:
    """u32 `[256]`."""
    t = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        t = np.where(t & 1, (t >> np.uint32(1)) ^ POLY, t >> np.uint32(1))
    return t


def _apply(matrix: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The GF(2) matrix u32 `[32]` (one column a bit) times every element of v."""
    out = np.zeros_like(v)
    for bit in range(32):
        out ^= np.where(v >> np.uint32(bit) & 1, matrix[bit], np.uint32(0))
    return out


@cache
def _zeros(power: int) -> np.ndarray:
    """The matrix that appends `2**power` zero bytes to a register."""
    if power == 0:
        unit = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return table()[unit & 255] ^ (unit >> np.uint32(8))
    half = _zeros(power - 1)
    return _apply(half, half)


def crc32c(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """CRC32C of `data`: 4 096 bytes at a time in parallel lanes, whose registers are then joined pairwise."""
    data = np.frombuffer(data, dtype=np.uint8)
    n = len(data)
    power = max((max(n - 1, 0)).bit_length(), 2)
    columns = power // 2
    lanes = np.zeros(1 << power, np.uint8)
    lanes[len(lanes) - n :] = data  # leading zeros leave a zero register as it is
    lanes = lanes.reshape(-1, 1 << columns)
    t = table()
    state = np.zeros(len(lanes), np.uint32)
    for column in lanes.T:
        state = t[(state ^ column) & 255] ^ (state >> np.uint32(8))
    while len(state) > 1:
        state = _apply(_zeros(columns), state[0::2]) ^ state[1::2]
        columns += 1
    start = np.array([0xFFFFFFFF], np.uint32)
    for bit in range(n.bit_length()):
        if n >> bit & 1:
            start = _apply(_zeros(bit), start)
    return int(start[0] ^ state[0]) ^ 0xFFFFFFFF
