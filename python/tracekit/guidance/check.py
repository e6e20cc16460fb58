"""Row checks in torch: the low 16 bits of the CRC32C of each row, and the search for a row that satisfies one.

CRC is affine over GF(2): crc(row) = crc(zeros) ^ XOR over positions of table[position, byte]. So all rows are checked
in one gather, and the check of a changed row follows from the bytes that change.
"""

from functools import cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from tracekit.guidance.crc import crc32c, table

LIST = 8  # doubtful choices that are tried, singly and in pairs


@cache
def _tables(n: int, device: torch.device) -> tuple[Tensor, int]:
    """(int32 `[n, 256]` low 16 bits of each byte's share at each position, check of n zero bytes)."""
    rows = np.empty((n, 256), np.uint32)
    share = t = table()
    for j in reversed(range(n)):
        rows[j] = share
        share = t[share & 255] ^ (share >> np.uint32(8))
    shares = torch.from_numpy((rows & 0xFFFF).astype(np.int32)).to(device)
    return shares, crc32c(bytes(n)) & 0xFFFF


def _fold(x: Tensor) -> Tensor:
    """XOR over the last axis."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat([x[..., :half] ^ x[..., half : 2 * half], rest], -1)
    return x.squeeze(-1)


def shares(rows: Tensor) -> Tensor:
    """int32 `[..., n]`: each byte's share in the check of its row, rows u8 `[..., n]`."""
    lookup, _ = _tables(rows.shape[-1], rows.device)
    index = rows.long() + 256 * torch.arange(rows.shape[-1], device=rows.device)
    return lookup.view(-1)[index]


def check16(rows: Tensor) -> Tensor:
    """int32 `[...]`: low 16 bits of the CRC32C of rows u8 `[..., n]`."""
    _, zero = _tables(rows.shape[-1], rows.device)
    return _fold(shares(rows)) ^ zero


@cache
def _tries(n: int, device: torch.device) -> Tensor:
    """bool `[n (n + 1) / 2, n]`: each change alone, then each pair."""
    tries = [(i,) for i in range(n)] + list(combinations(range(n), 2))
    masks = torch.zeros(len(tries), n, dtype=torch.bool)
    for k, t in enumerate(tries):
        masks[k, list(t)] = True
    return masks.to(device)


def search(wrong: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `LIST` changes, singly or in pairs, repair a row's check.

    `wrong` int32 `[R]` is the check computed xor the check stored, `delta` int32 `[R, L]` what each change does to it.
    Returns (found bool `[R]`, chosen bool `[R, L]`). With 16 bits and 36 tries one wrong row in 1 800 is accepted.
    """
    masks = _tries(delta.shape[1], delta.device)
    effect = _fold(torch.where(masks, delta[:, None, :], 0))
    hit = effect == wrong[:, None]
    return hit.any(1), masks[hit.to(torch.uint8).argmax(1)]
