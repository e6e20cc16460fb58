"""Log-probs of labels from logits, and their backward piece by piece so that no [tokens, vocabulary] is whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchtitan.components.loss import compute_logprobs

from tracekit.objectives.batch import LossBatch, LossOutput
from tracekit.objectives.objective import Objective
from tracekit.objectives.two_pass import LogProbs, two_pass_backward


def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    entropy_grad: bool = False,
    topk_ids: torch.Tensor | None = None,
) -> LogProbs:
    """Log-prob of each label [B, L], entropy there (with a graph only if `entropy_grad`) and log-probs of `topk_ids`
    [B, L, K], all float32 under `logits` [B, L, V] / `temperature` over the whole vocabulary."""
    logits = logits.float() / temperature
    logp, entropy = compute_logprobs(logits, labels, return_entropy=True)
    if entropy_grad:
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
    topk = None
    if topk_ids is not None:
        topk = logits.gather(-1, topk_ids) - logits.logsumexp(-1, keepdim=True)
    return LogProbs(logp=logp, entropy=entropy, topk=topk)


def chunks(mask: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Flat indices of the tokens that `mask` [B, L] keeps, `size` at a time."""
    return list(mask.reshape(-1).nonzero()[:, 0].split(size))


def scatter(shape: torch.Size, pieces: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """`values` [P, ...] at the flat indices `pieces` of a tensor [*shape, ...], 0 elsewhere."""
    first = values[0]
    out = first.new_zeros(shape.numel(), *first.shape[1:])
    return out.index_put((torch.cat(pieces),), torch.cat(values)).view(*shape, *first.shape[1:])


def chunked_backward(
    objective: Objective,
    batch: LossBatch,
    hidden: torch.Tensor,
    pieces: list[torch.Tensor],
    head: Callable[[torch.Tensor, torch.Tensor], LogProbs],
) -> tuple[LossOutput, torch.Tensor]:
    """Loss of `batch` and its gradient with respect to `hidden`, whose own graph is not entered.

    hidden: [P, D] of the tokens of `pieces` (flat indices into the batch), in their order.
    head: (hidden of a piece [p, D], its flat indices [p]) -> log-probs; called twice a piece. Gradients of what else
        it reads (the head's weight) accumulate.
    Returns the loss, without graph, and d loss / d hidden [P, D].
    """
    leaves = [h.detach().requires_grad_() for h in hidden.split([len(piece) for piece in pieces])]
    of = {id(piece): leaf for piece, leaf in zip(pieces, leaves, strict=True)}
    out = two_pass_backward(objective, batch, pieces, lambda piece: head(of[id(piece)], piece))
    return out, torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
