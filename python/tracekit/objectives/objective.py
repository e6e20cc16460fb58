"""An objective: a policy loss, one correction of the mismatch, KL and entropy terms, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import DataError
from tracekit.objectives.aggregate import token_scale
from tracekit.objectives.batch import LossBatch, LossOutput, StepTotals
from tracekit.objectives.corrections.base import Correction, Weights
from tracekit.objectives.histograms import record_histograms
from tracekit.objectives.losses.base import PolicyLoss, Surrogate
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.mismatch import record_mismatch
from tracekit.objectives.penalties import kl_penalty
from tracekit.objectives.policy_metrics import record_correction, record_input, record_policy
from tracekit.objectives.registry import CommonKnobs
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms


class Objective:
    """Maps a `LossBatch` to a `LossOutput`. Pure but for `state`, which only `begin_batch` changes.

    Make one with `policy_loss`. Order of operations: clean input, weights and rejection from rho, clipped surrogate,
    weight, aggregate, then KL and entropy terms.
    """

    def __init__(self, loss: PolicyLoss, correction: Correction, common: CommonKnobs):
        self.loss = loss
        self.correction = correction
        self.common = common
        self.state = ObjectiveState()
        self.agg_mode = common.loss_agg_mode or loss.aggregation
        correction.bind(loss)
        correction.prepare_state(self.state)

    # What the trainer must provide ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the policy loss."""
        return self.loss.name

    @property
    def advantage(self) -> str:
        """Name of the advantage estimator: `gae`, or one of `advantages.CRITIC_FREE`."""
        return self.common.advantage or self.loss.advantage

    @property
    def needs_values(self) -> bool:
        """Needs a critic (GAE advantages and a value loss)."""
        return self.advantage == "gae"

    @property
    def needs_ref(self) -> bool:
        """Needs `logp_ref`."""
        return self.common.kl_coef != 0

    @property
    def needs_entropy(self) -> bool:
        """Needs `entropy` with a graph; without it entropy is only a metric, and optional."""
        return self.common.entropy_coef != 0

    @property
    def needs_topk(self) -> int:
        """K of `logp_topk` and `logp_mu_topk`; 0 if not needed."""
        return self.correction.needs_topk

    @property
    def needs_old(self) -> bool:
        """Reads logp_old in the loss (bypass mode only reports it)."""
        return not self.two_policies

    @property
    def two_pass(self) -> bool:
        """Coefficients of a token depend on its whole response, or totals on the current policy.

        Then chunked logits and context parallelism need `two_pass.two_pass_backward`; every other objective may also
        use it.
        """
        whole = self.two_policies and self.correction.level == "sequence"
        return self.loss.level == "sequence" or whole or self.correction.drops_by_logp or self.totals_need_logp

    @property
    def totals_need_logp(self) -> bool:
        """`totals` needs logp in its batches: what survives rejection depends on the current policy."""
        return self.common.denominator == "surviving" and self._drops_by_logp

    @property
    def two_policies(self) -> bool:
        """logp_mu stands where logp_old would: bypass mode, or a loss defined on the sampler alone."""
        return self.common.bypass or not self.loss.uses_old

    @property
    def _drops_by_logp(self) -> bool:
        rejects = self.two_policies and self.correction.rejects
        return self.loss.drops_by_logp or self.correction.drops_by_logp or rejects

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step (ACRL's X); goes into the checkpoint."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`. X is then never measured again."""
        self.state.load_state_dict(state)

    # Once a rollout batch, once an optimizer step -------------------------------------------------------------------

    def begin_batch(
        self,
        batches: Iterable[LossBatch],
        process_group: dist.ProcessGroup | None = None,
        *,
        reference: Iterable[LossBatch] | None = None,
    ) -> None:
        """Call once a rollout batch, when logp_old is known and before the first mini-step. Collective.

        Measures the discrepancy Y of the batch and of each prompt, and X the first time: on `reference` (the unfiltered
        responses, or a baseline set) if given, else on `batches`. `logp` may be None in them.
        """
        self.state.measure(
            [self._terms(b) for b in batches],
            process_group,
            reference=None if reference is None else [self._terms(b) for b in reference],
        )

    def totals(self, batches: Iterable[LossBatch], process_group: dist.ProcessGroup | None = None) -> StepTotals:
        """Denominators of one optimizer step, from all its microbatches on this rank; summed over `process_group`.

        `logp` may be None unless denominator="surviving" and what is dropped depends on it (`two_pass`).
        Pass the result as `LossBatch.totals`. Collective if a group is given.
        """
        total = StepTotals(tokens=0.0, sequences=0.0)
        for batch in batches:
            total = total + self._totals(self._terms(batch))
        return total.reduced(process_group)

    def _totals(self, t: Terms, weights: Weights | None = None, keep: Tensor | None = None) -> StepTotals:
        normalise, surviving = self.correction.batch_normalize, self.common.denominator == "surviving"
        if weights is None and (normalise or surviving):
            weights = self.correction(t, self.state)
        weight_sum, weight_count = self.correction.weight_totals(t, weights) if normalise else (0.0, 0.0)
        counted = t.valid
        if surviving:
            if keep is None:
                if self._drops_by_logp and t.batch.logp is None:
                    raise DataError(
                        "totals: denominator='surviving' with a rejection that depends on logp\n"
                        "compute logp first (no graph needed) and put it into the batches"
                    )
                keep = self._keep(t, weights, self.loss(t, weights))
            counted = counted & keep
        sequences = (t.seg.sum(counted.to(t.old.dtype)) > 0).sum()
        return StepTotals(
            tokens=counted.sum().double(),
            sequences=sequences.double(),
            weight_sum=weight_sum,
            weight_count=weight_count,
        )

    # The loss -------------------------------------------------------------------------------------------------------

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Loss, coefficients and metrics of one microbatch.

        Raises: DataError for missing tensors or wrong shapes; with nonfinite="raise" for non-finite learner input.
        """
        if batch.logp is None:
            raise DataError("objective: LossBatch.logp is None; it may only be left out of begin_batch and totals")
        t = self._terms(batch)
        if self.common.nonfinite == "raise" and int(t.nonfinite):
            raise DataError(
                f"{int(t.nonfinite)} response tokens have a non-finite logp, logp_old, logp_ref or advantage"
            )
        w = self.correction(t, self.state)
        s = self.loss(t, w)
        keep = self._keep(t, w, s)
        totals = batch.totals if batch.totals is not None else self._totals(t, w, keep)
        counted = t.valid & keep if self.common.denominator == "surviving" else t.valid
        k = token_scale(self.agg_mode, t, totals, counted, self.common.loss_max_length)

        active = t.live & keep
        u = w.weight
        if self.correction.batch_normalize:
            mean = torch.as_tensor(totals.weight_sum) / torch.as_tensor(totals.weight_count).clamp(min=1.0)
            u = u / mean.to(u).clamp(min=1e-8)
        token_loss = u * s.ell if w.centre is None else u * s.ell + w.centre
        loss = (k * torch.where(active, token_loss, 0.0)).sum()
        coefficients = torch.where(active, k * u * s.slope, 0.0)

        m = Metrics()
        loss, coefficients, entropy_coefficients = self._penalties(m, t, k, loss, coefficients)
        topk = None
        if w.topk_slope is not None:
            topk = torch.where(active[:, None], k[:, None] * w.topk_slope, 0.0)
            topk = topk.detach().reshape(batch.logp_topk.shape)
        self._record(m, t, w, s, keep, active, loss)
        return LossOutput(
            loss=loss,
            coefficients=coefficients.detach().reshape(batch.mask.shape),
            metrics=m,
            topk_coefficients=topk,
            entropy_coefficients=entropy_coefficients,
            nonfinite=t.nonfinite,
        )

    def advice(self, metrics: Metrics, mini_step: int) -> str | None:
        """A warning worth a person's eye about this mini-step's merged metrics (0 is the batch's first), or None."""
        return self.loss.advice(metrics, mini_step)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _terms(self, batch: LossBatch) -> Terms:
        whole = self.loss.level == "sequence" or self.correction.level == "sequence"
        if self.needs_ref and batch.logp_ref is None and batch.logp is not None:
            raise DataError(f"objective {self.name!r} with kl_coef={self.common.kl_coef} needs LossBatch.logp_ref")
        return Terms.build(batch, whole_responses=whole, bypass=self.two_policies)

    def _keep(self, t: Terms, w: Weights, s: Surrogate) -> Tensor:
        keep = torch.ones_like(t.live)
        for mask in (w.keep, s.keep):
            if mask is not None:
                keep = keep & mask
        return keep & (t.adv >= 0) if self.common.positive_only else keep

    def _penalties(self, m: Metrics, t: Terms, k: Tensor, loss: Tensor, coefficients: Tensor):
        c, batch = self.common, t.batch
        entropy_coefficients = None
        if batch.logp_ref is not None:
            ref = torch.where(t.live, batch.flat(batch.logp_ref).to(t.old.dtype), 0.0)
            kl, slope = kl_penalty(t.logp, ref, c.kl_estimator)
            m.means("kl", {"policy/kl_ref": kl}, t.live)
            if c.kl_coef:
                loss = loss + c.kl_coef * (k * torch.where(t.live, kl, 0.0)).sum()
                coefficients = coefficients + torch.where(t.live, c.kl_coef * k * slope, 0.0)
        if c.entropy_coef:
            if batch.entropy is None:
                raise DataError(f"objective {self.name!r} with entropy_coef={c.entropy_coef} needs LossBatch.entropy")
            entropy = torch.where(t.live, batch.flat(batch.entropy).to(t.old.dtype), 0.0)
            loss = loss - c.entropy_coef * (k * entropy).sum()
            entropy_coefficients = torch.where(t.live, -c.entropy_coef * k, 0.0).reshape(batch.mask.shape)
        return loss, coefficients, entropy_coefficients

    @torch.no_grad()
    def _record(self, m: Metrics, t: Terms, w: Weights, s: Surrogate, keep: Tensor, active: Tensor, loss: Tensor):
        full = self.common.metric_level == "full"
        record_input(m, t, active, loss)
        record_mismatch(m, t, full=full)
        record_policy(m, t, s, active)
        record_correction(m, t, w, keep)
        if full:
            record_histograms(m, t, s, getattr(self.correction.knobs, "is_cap", None))
        self.state.record(m, t)
        self.loss.record(m, t, s)
        self.correction.record(m, t, w, self.state)


def with_totals(batches: Iterable[LossBatch], totals: StepTotals) -> list[LossBatch]:
    """The same microbatches, each carrying the step's totals."""
    return [replace(b, totals=totals) for b in batches]
