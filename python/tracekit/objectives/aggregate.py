"""From token losses to one number: a weight for each token, with global denominators."""

import torch
from torch import Tensor

from tracekit.objectives.batch import StepTotals
from tracekit.objectives.terms import Terms

AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


def token_scale(mode: str, t: Terms, totals: StepTotals, counted: Tensor, max_length: int | None) -> Tensor:
    """k [T] such that the step's loss is the sum of k * token loss over microbatches and ranks.

    With M responses, L_i tokens in response i and S tokens in all:
        token-mean               1 / S
        seq-mean-token-mean      1 / (M L_i)
        seq-mean-token-sum       1 / M
        seq-mean-token-sum-norm  1 / (M max_length)
        token-sum                1
    counted: [T] bool, the tokens that L_i counts (`valid`, or the survivors of rejection).
    """
    dtype = t.old.dtype
    one = torch.ones_like(t.old)
    tokens = torch.as_tensor(totals.tokens, dtype=dtype, device=one.device).clamp(min=1.0)
    sequences = torch.as_tensor(totals.sequences, dtype=dtype, device=one.device).clamp(min=1.0)
    if mode == "token-mean":
        return one / tokens
    if mode == "seq-mean-token-mean":
        length = t.seg.sum(counted.to(dtype)).clamp(min=1.0)
        return 1.0 / (sequences * t.seg.spread(length).clamp(min=1.0))
    if mode == "seq-mean-token-sum":
        return one / sequences
    if mode == "seq-mean-token-sum-norm":
        return one / (sequences * max_length)
    return one
