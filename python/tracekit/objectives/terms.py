"""Cleaned, flat tensors and ratios that every surrogate and correction starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.errors import DataError
from tracekit.objectives.batch import LossBatch
from tracekit.objectives.segments import Segments

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp, per token and per response."""


def safe_exp(x: Tensor) -> Tensor:
    """exp of x clamped to ±LOG_RATIO_LIMIT; the gradient is 0 outside."""
    return torch.exp(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@dataclass(slots=True)
class Terms:
    """Flat [T] tensors in fp32 (fp64 if logp_old is fp64); 0 where the token does not count.

    r = exp(logp - logp_old), rho = exp(logp_old - logp_mu); in bypass mode logp_old is logp_mu, so rho is 1.
    """

    batch: LossBatch
    seg: Segments
    logp: Tensor
    """With graph."""
    old: Tensor
    mu: Tensor
    adv: Tensor
    valid: Tensor
    """Bool: counts in denominators."""
    live: Tensor
    """Bool: valid and every learner input finite; only these enter the loss."""
    length: Tensor
    """[n] valid tokens of each response."""
    masked: Tensor
    """Bool: the batch's mask, before anything was dropped."""
    learner_old: Tensor
    """logp_old of the batch, also in bypass mode (for metrics)."""
    bypass: bool

    @classmethod
    def build(cls, batch: LossBatch, *, whole_responses: bool, bypass: bool = False) -> Terms:
        """Apply the rules for masks and non-finite input.

        whole_responses: one non-finite logp_mu drops the response, not the token (sequence-level methods).
        """
        shape = batch.mask.shape
        for name in ("logp", "logp_old", "logp_mu", "advantages", "segment_ids", "logp_ref", "entropy"):
            x = getattr(batch, name)
            if x is not None and x.shape != shape:
                raise DataError(f"LossBatch.{name} has shape {tuple(x.shape)}, mask has {tuple(shape)}")
        dtype = torch.float64 if batch.logp_old.dtype == torch.float64 else torch.float32
        seg = Segments(batch.flat_segment_ids(), batch.responses)
        masked = batch.flat(batch.mask).bool() & (seg.ids >= 0)
        raw_logp = batch.logp if batch.logp is not None else torch.zeros_like(batch.logp_old)
        raw = [batch.flat(x).to(dtype) for x in (raw_logp, batch.logp_old, batch.logp_mu, batch.advantages)]
        logp, old, mu, adv = raw

        bad_mu = masked & ~torch.isfinite(mu)
        if whole_responses:
            bad_mu = seg.spread(seg.sum(bad_mu.to(dtype)) > 0)
        valid = masked & ~bad_mu
        live = valid & torch.isfinite(logp) & torch.isfinite(old) & torch.isfinite(adv)
        for x in (batch.logp_ref, batch.entropy):
            if x is not None:
                live = live & torch.isfinite(batch.flat(x))
        if batch.logp_topk is not None and batch.logp_mu_topk is not None:
            head = torch.isfinite(batch.flat(batch.logp_mu_topk))
            live = live & (torch.isfinite(batch.flat(batch.logp_topk)) | ~head).all(-1)
        # Before any arithmetic: a NaN that meets exp or a product would come back through the gradient.
        logp = torch.where(live, logp, 0.0)
        old, mu, adv = (torch.where(live, x.detach(), 0.0) for x in (old, mu, adv))
        length = seg.sum(valid.to(dtype))
        pivot = mu if bypass else old
        return cls(batch, seg, logp, pivot, mu, adv, valid, live, length, masked, old, bypass)

    @property
    def nonfinite(self) -> Tensor:
        """Valid tokens that a learner's non-finite number took out."""
        return (self.valid & ~self.live).sum()

    @property
    def sg_logp(self) -> Tensor:
        """logp without graph."""
        return self.logp.detach()

    @property
    def delta(self) -> Tensor:
        """logp - logp_old, with graph."""
        return self.logp - self.old

    @property
    def lam(self) -> Tensor:
        """log rho = logp_old - logp_mu; in bypass mode logp - logp_mu, detached."""
        return (self.sg_logp if self.bypass else self.old) - self.mu

    @property
    def tot(self) -> Tensor:
        """logp - logp_mu, detached."""
        return self.sg_logp - self.mu

    def mean(self, x: Tensor) -> Tensor:
        """[T] to [n]: mean over a response's live tokens; 0 for a response without any."""
        count = self.seg.sum(self.live.to(x.dtype)).clamp(min=1.0)
        return self.seg.sum(torch.where(self.live, x, 0.0)) / count

    def total(self, x: Tensor) -> Tensor:
        """[T] to [n]: sum over a response's live tokens."""
        return self.seg.sum(torch.where(self.live, x, 0.0))

    def has(self, keep: Tensor) -> Tensor:
        """[n] bool: responses with at least one token in `keep` [T]."""
        return self.seg.sum((self.valid & keep).to(self.old.dtype)) > 0
