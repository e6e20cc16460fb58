"""Backward in two passes over pieces, for methods whose coefficients need whole responses.

Every objective here has a gradient of the form sum c_t d logp_t (plus the same for entropy and top-k log-probs), with
detached c. Pass A computes logp of all tokens without graph, piece by piece; the objective turns them into
coefficients; pass B computes logp again, piece by piece, and sends sum c_t logp_t backwards. No [T, V] logits tensor is
ever whole. The second forward of the pieces is the price; methods with `Objective.two_pass` false need it only to save
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.objectives.batch import LossBatch, LossOutput
from tracekit.objectives.objective import Objective


@dataclass(kw_only=True, slots=True)
class LogProbs:
    """What the model says about one piece of P tokens."""

    logp: Tensor
    """[P]"""
    entropy: Tensor | None = None
    """[P]; needed with a graph if `Objective.needs_entropy`, else only for metrics."""
    topk: Tensor | None = None
    """[P, K], if `Objective.needs_topk`."""


def weighted_sum(out: LossOutput, piece: LogProbs, index: slice | Tensor) -> Tensor:
    """Scalar with the gradient of the loss for the tokens `index` (flat) that `piece` holds."""
    total = (out.coefficients.reshape(-1)[index] * piece.logp).sum()
    if out.entropy_coefficients is not None:
        if piece.entropy is None:
            raise DataError("two-pass: the objective has an entropy term, so every piece must carry entropy")
        total = total + (out.entropy_coefficients.reshape(-1)[index] * piece.entropy).sum()
    if out.topk_coefficients is not None:
        flat = out.topk_coefficients.reshape(-1, out.topk_coefficients.shape[-1])[index]
        total = total + (flat * piece.topk).sum()
    return total


def two_pass_backward(
    objective: Objective,
    batch: LossBatch,
    pieces: Sequence[slice | Tensor],
    logprobs: Callable[[slice | Tensor], LogProbs],
    *,
    gather: Callable[[list[LogProbs]], LogProbs] | None = None,
    scale: float = 1.0,
) -> LossOutput:
    """Run both passes and `backward()` of each piece. The returned `loss` is a number without graph.

    batch: the whole microbatch, `logp` ignored (token tensors flat order [T]).
    pieces: flat indices of the tokens, each piece one `logprobs` call; together all tokens, or with context parallelism
        all tokens of this rank.
    logprobs: piece → its log-probs, with a graph when grad is enabled; called twice a piece.
    gather: context parallelism: all pieces of this rank → log-probs of the whole batch, in flat order (a collective).
        None concatenates slices, or scatters index tensors.
    scale: factor on the gradient (the data-parallel size where gradients are averaged).
    """
    shape = batch.mask.shape
    with torch.no_grad():
        parts = [logprobs(piece) for piece in pieces]
        whole = gather(parts) if gather is not None else _join(pieces, parts, batch.mask.numel())
        out = objective(
            batch.with_(
                logp=whole.logp.reshape(shape),
                entropy=None if whole.entropy is None else whole.entropy.reshape(shape),
                logp_topk=None if whole.topk is None else whole.topk.reshape(*shape, -1),
            )
        )
    for piece in pieces:
        (scale * weighted_sum(out, logprobs(piece), piece)).backward()
    return out


def _join(pieces: Sequence[slice | Tensor], parts: list[LogProbs], n: int) -> LogProbs:
    def place(values: list[Tensor | None]) -> Tensor | None:
        if any(v is None for v in values):
            return None
        out = values[0].new_zeros(n, *values[0].shape[1:])
        for piece, value in zip(pieces, values, strict=True):
            out[piece] = value
        return out

    return LogProbs(
        logp=place([p.logp for p in parts]),
        entropy=place([p.entropy for p in parts]),
        topk=place([p.topk for p in parts]),
    )
