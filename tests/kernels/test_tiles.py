"""The assembly of bf16 pairs, executed on a CPU: the interpreter takes other paths."""

import numpy as np
import torch
from run_ptx import run

from tracekit.kernels.tiles import _LARGER, _SIGNS


def test_signs_of_a_tile_reach_their_nibbles():
    """Each of 256 patterns of signs, under any magnitude codes and any other bits of the elements."""
    rng = np.random.default_rng(0)
    patterns = np.arange(256, dtype=np.uint32)
    negative = (patterns[:, None] >> np.arange(8, dtype=np.uint32)) & 1
    elements = rng.integers(0, 1 << 15, (256, 8), dtype=np.uint32) | negative << np.uint32(15)
    words = elements[:, 0::2] | elements[:, 1::2] << np.uint32(16)
    codes = rng.integers(0, 8, (256, 8), dtype=np.uint32)
    places = np.arange(8, dtype=np.uint32) * 4
    magnitudes = (codes << places).sum(1, dtype=np.uint32)
    (got,) = run(_SIGNS.value, 1, magnitudes, *words.T)
    np.testing.assert_array_equal(got, ((codes | negative << np.uint32(3)) << places).sum(1, dtype=np.uint32))


def test_the_larger_of_two_pairs():
    """Magnitudes against fp32's maximum, NaN kept; every bf16 against a shuffle of them."""
    rng = np.random.default_rng(1)
    every = np.arange(65536, dtype=np.uint32)
    a, b = (rng.permutation(every) | rng.permutation(every) << np.uint32(16) for _ in range(2))
    (got,) = run(_LARGER.value, 1, a, b)

    def halves(word):
        return torch.from_numpy(word.view(np.int16).copy()).view(torch.bfloat16).float().abs()

    want = torch.maximum(halves(a), halves(b))
    assert want.isnan().sum() > 500
    assert torch.equal(halves(got).isnan(), want.isnan())
    assert torch.equal(halves(got).nan_to_num(0), want.nan_to_num(0))
