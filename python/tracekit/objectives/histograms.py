"""Histograms of the ratios, with the lines that clip them: r, rho, and r against the old probability.

They are the pictures of QaRL (arXiv 2604.07853, figures 4 and 5). Fixed bins, so that counts add over microbatches.
"""

import torch
from torch import Tensor

from tracekit.objectives.losses.base import Surrogate
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import Terms

LOG2_RATIO_EDGES = tuple(-4 + i / 8 for i in range(65))
"""Edges in log2 of the ratio: 1/16 to 16, eight bins an octave, plus one bin below and one above."""
PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
"""Edges of the old probability, plus one bin below and one above."""
_COARSE = LOG2_RATIO_EDGES[::4]


def _bins(x: Tensor, edges: tuple[float, ...]) -> Tensor:
    return torch.bucketize(x.contiguous(), torch.tensor(edges, dtype=x.dtype, device=x.device), right=True)


def _count(index: Tensor, size: int, mask: Tensor) -> Tensor:
    slot = torch.where(mask, index, size)
    ones = torch.ones(slot.shape, dtype=torch.float64, device=slot.device)
    return ones.new_zeros(size + 1).index_add(0, slot, ones)[:size]


def record_histograms(m: Metrics, t: Terms, s: Surrogate, cap: float | None) -> None:
    """`hist/ratio`, `hist/mismatch_ratio`, and `hist/ratio_by_old_prob_{positive,negative}` (rows: probability)."""
    log2 = 1.4426950408889634
    n = len(LOG2_RATIO_EDGES) + 1
    edges = [2.0**e for e in LOG2_RATIO_EDGES]
    r = t.delta.detach() * log2
    rho = (t.learner_old - t.mu) * log2
    m.histogram("hist/ratio", _count(_bins(r, LOG2_RATIO_EDGES), n, t.live), edges=edges, lines=list(s.lines))
    lines = [] if cap is None else [cap]
    m.histogram("hist/mismatch_ratio", _count(_bins(rho, LOG2_RATIO_EDGES), n, t.live), edges=edges, lines=lines)
    row, column = _bins(torch.exp(t.learner_old), PROBABILITY_EDGES), _bins(r, _COARSE)
    rows, columns = len(PROBABILITY_EDGES) + 1, len(_COARSE) + 1
    for name, sign in (("positive", t.adv > 0), ("negative", t.adv < 0)):
        counts = _count(row * columns + column, rows * columns, t.live & sign).reshape(rows, columns)
        m.histogram(
            f"hist/ratio_by_old_prob_{name}",
            counts,
            row_edges=list(PROBABILITY_EDGES),
            edges=[2.0**e for e in _COARSE],
            lines=list(s.lines),
        )
