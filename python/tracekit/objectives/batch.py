"""What an objective reads (`LossBatch`) and returns (`LossOutput`), and the totals that tie microbatches together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import DataError

if TYPE_CHECKING:
    from tracekit.objectives.metrics import Metrics


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Counts over everything that one optimizer step sees: all microbatches of all data-parallel ranks.

    They add: `a + b` merges two parts, `reduced(group)` sums over ranks. `Objective.totals` makes them.
    """

    tokens: float | Tensor
    """Masked-in tokens with a usable logp_mu (only those that survive rejection with denominator="surviving")."""
    sequences: float | Tensor
    """Responses with at least one such token."""
    weight_sum: float | Tensor = 0.0
    """Sum of the correction's weights; only read by batch-normalised weights."""
    weight_count: float | Tensor = 0.0
    """Number of weights in `weight_sum`."""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(**{f: getattr(self, f) + getattr(other, f) for f in _TOTAL_FIELDS})

    def reduced(self, process_group: dist.ProcessGroup | None) -> StepTotals:
        """Sum over the ranks of `process_group`; None returns self."""
        if process_group is None:
            return self
        like = next((v for v in map(self.__getattribute__, _TOTAL_FIELDS) if isinstance(v, Tensor)), torch.zeros(()))
        parts = [torch.as_tensor(getattr(self, f), dtype=torch.float64, device=like.device) for f in _TOTAL_FIELDS]
        packed = torch.stack(parts)
        dist.all_reduce(packed, group=process_group)
        return StepTotals(**dict(zip(_TOTAL_FIELDS, packed.unbind(), strict=True)))


_TOTAL_FIELDS = ("tokens", "sequences", "weight_sum", "weight_count")


@dataclass(kw_only=True, slots=True)
class LossBatch:
    """One microbatch. Token tensors are padded [N, T], or packed ([T] or any shape) with `segment_ids` of that shape.

    A response lies in one microbatch. Where `mask` is false any value is allowed, NaN and infinities too.
    All log-probs are of the sampled token, natural, over the whole vocabulary, at the sampling temperature.
    """

    logp: Tensor | None
    """Learner at the current weights; the only tensor that carries gradient (with entropy and logp_topk)."""
    logp_old: Tensor
    """Learner at the weights that opened the batch."""
    logp_mu: Tensor
    """Sampler at sampling time. NaN or infinite: see `docs/concepts/objectives.md`, degenerate input."""
    advantages: Tensor
    """Advantage of each token."""
    mask: Tensor
    """Bool: true on sampled response tokens, EOS included."""
    segment_ids: Tensor | None = None
    """Packed layout: response of each token in [0, n_segments), -1 for none. None means padded [N, T]."""
    n_segments: int | None = None
    """Packed layout: number of responses N in this microbatch."""
    group: Tensor | None = None
    """[N] int, id of the prompt, unique over the whole batch."""
    logp_ref: Tensor | None = None
    """Frozen reference policy, for the KL term."""
    values: Tensor | None = None
    """Critic at the current weights (graph), at the position that predicts the token."""
    values_old: Tensor | None = None
    """Critic when the batch opened, for value clipping."""
    returns: Tensor | None = None
    """Target of the critic."""
    entropy: Tensor | None = None
    """Entropy of the learner's distribution at each token (graph if entropy_coef is not 0)."""
    logp_topk: Tensor | None = None
    """[..., K] learner log-probs (graph) of the sampler's K most likely tokens."""
    logp_mu_topk: Tensor | None = None
    """[..., K] sampler log-probs of the same tokens; a non-finite entry means fewer than K were returned."""
    version_lag: Tensor | None = None
    """[N] learner version minus the oldest sampler version of the response; splits the metrics."""
    totals: StepTotals | None = None
    """Totals of the optimizer step; None takes those of this batch alone."""

    @property
    def responses(self) -> int:
        """N.

        Raises: DataError if a packed batch does not say `n_segments`.
        """
        if self.segment_ids is None:
            return self.mask.shape[0]
        if self.n_segments is None:
            raise DataError("LossBatch: segment_ids without n_segments; pass the number of responses in the microbatch")
        return self.n_segments

    def flat(self, x: Tensor) -> Tensor:
        """A token tensor as [T]; a tensor with a trailing top-k axis as [T, K]."""
        return x.reshape(-1, *x.shape[self.mask.dim() :])

    def flat_segment_ids(self) -> Tensor:
        """[T] int64, -1 for tokens of no response."""
        if self.segment_ids is not None:
            return self.segment_ids.reshape(-1).long()
        n, length = self.mask.shape
        return torch.arange(n, device=self.mask.device).repeat_interleave(length)

    def with_(self, **changes) -> LossBatch:
        """A copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """Loss of one microbatch. Losses and gradients of the parts of a step add up to those of the whole."""

    loss: Tensor
    """Scalar with a graph (if logp has one): this microbatch's share of the step's loss."""
    coefficients: Tensor
    """Shape of logp, detached: d loss / d logp."""
    metrics: Metrics
    """Sums, counts and extremes; `merge` them, then `finalize`."""
    topk_coefficients: Tensor | None = None
    """[..., K], detached: d loss / d logp_topk (Score Centering only)."""
    entropy_coefficients: Tensor | None = None
    """Shape of logp, detached: d loss / d entropy (with entropy_coef only)."""
    nonfinite: Tensor | None = None
    """Scalar int: masked-in tokens whose logp, logp_old, advantage or other learner input is not finite. They are left
    out of the loss; skip the optimizer step if the sum over microbatches and ranks is not 0."""
