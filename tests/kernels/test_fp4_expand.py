"""The assembly that expands FP4, run instruction by instruction on a CPU: every code under every scale, exact."""

import numpy as np
import pytest
import torch
from run_ptx import run

from tracekit.kernels import fp4_expand
from tracekit.numerics import e2m1_decode, e4m3_decode


def slot_nibbles(decode):
    """Nibble of each slot. Slots (0, 2), (4, 6), (1, 3), (5, 7) share registers; nibbles (p, p + 4) by shifts."""
    if decode == "e4m3":
        return list(range(8))
    pairs = dict(zip(((0, 2), (4, 6), (1, 3), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)), strict=True))
    nibble = {slot: n for slots, nibbles in pairs.items() for slot, n in zip(slots, nibbles, strict=True)}
    return [nibble[slot] for slot in range(8)]


def cases():
    """(words [N], their nibbles [N, 8], scale bytes [N]): each code in each place under each of the 127 scales."""
    generator = np.random.default_rng(0)
    nibbles = (np.arange(16)[:, None] + np.arange(8)[None, :]) % 16
    nibbles = np.concatenate([nibbles, generator.integers(0, 16, (64, 8))])
    nibbles = np.repeat(nibbles, 127, 0)
    words = (nibbles.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(1).astype(np.uint32)
    return words, nibbles, np.tile(np.arange(127, dtype=np.uint32), len(nibbles) // 127)


def values(nibbles, scales):
    codes = e2m1_decode(torch.from_numpy(nibbles.astype(np.uint8))).double().numpy()
    return codes * e4m3_decode(torch.from_numpy(scales.astype(np.uint8))).double().numpy()[:, None]


def as_floats(halves):
    return np.stack(halves, -1).view(np.float16).astype(np.float64)


def scale_pair(decode, first, second):
    return run(fp4_expand.SCALE_ASSEMBLY[decode], 1, first, second)[0]


@pytest.mark.parametrize("decode", ["e4m3", "shift"])
def test_keys(decode):
    words, nibbles, scales = cases()
    out = run(fp4_expand.key_assembly(decode), 8, words, scale_pair(decode, scales, scales))
    want = values(nibbles, scales)[:, slot_nibbles(decode)]
    assert np.array_equal(as_floats(out) * fp4_expand.CODE_FACTOR[decode], want)


@pytest.mark.parametrize("decode", ["e4m3", "shift"])
def test_values(decode):
    words, nibbles, scales = cases()
    other = np.roll(np.arange(len(words)), 12345)
    pair = scale_pair(decode, scales, scales[other])
    out = as_floats(run(fp4_expand.value_assembly(decode), 16, words, words[other], pair))
    out *= fp4_expand.CODE_FACTOR[decode]
    assert np.array_equal(out[:, 0::2], values(nibbles, scales))
    assert np.array_equal(out[:, 1::2], values(nibbles[other], scales[other]))
