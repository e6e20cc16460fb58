"""Error tokens: the garbled or repeated tokens that under-trained quantised policies produce in long responses.

QaRL (arXiv 2604.07853 section 3.2) says of them: rare in positive responses, common in negative ones; low probability
under the old and the current policy; in clusters. The thresholds below are ours, the paper gives none.
"""

import torch
from torch import Tensor

from tracekit.objectives.terms import Terms


def error_tokens(t: Terms, *, probability: float, window: int, cluster: int) -> Tensor:
    """[T] bool: tokens of negative responses with exp(logp_old) and exp(logp) below `probability`, at least `cluster`
    of which (itself included) lie within `window` tokens of the response around it."""
    low = (torch.exp(t.learner_old) < probability) & (torch.exp(t.sg_logp) < probability)
    suspect = t.live & low & (t.seg.spread(t.mean(t.adv)) < 0)
    index = torch.nonzero(t.live).reshape(-1)
    if index.numel() == 0:
        return suspect
    ids, flags = t.seg.ids[index], suspect[index]
    position = torch.arange(index.numel(), device=ids.device)
    # Neighbours count in sampled tokens of the same response: masked-in tokens are compressed, then bounded by it.
    starts = position.new_full((t.seg.n,), index.numel()).scatter_reduce(0, ids, position, "amin")
    ends = position.new_full((t.seg.n,), -1).scatter_reduce(0, ids, position, "amax")
    half = window // 2
    first = torch.maximum(position - half, starts[ids])
    last = torch.minimum(position + (window - 1 - half), ends[ids])
    running = torch.cat([flags.new_zeros(1, dtype=torch.long), torch.cumsum(flags.long(), 0)])
    near = running[last + 1] - running[first]
    out = torch.zeros_like(suspect)
    out[index] = flags & (near >= cluster)
    return out
