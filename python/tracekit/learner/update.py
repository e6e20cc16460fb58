"""What the learner does with one batch of rollouts: the pass that opens it, advantages, and the mini-steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from tracekit.config.schema import Config
from tracekit.guidance import GuidanceReader
from tracekit.learner.audits import StepAudit
from tracekit.learner.calibrate import profiles
from tracekit.learner.critic import Critic
from tracekit.learner.gaps import SiteGaps
from tracekit.learner.guide import Guide, guided
from tracekit.learner.learner import Learner
from tracekit.learner.logprobs import chunked_backward, chunks, scatter
from tracekit.learner.packing import Microbatch, microbatches
from tracekit.learner.records import load_records
from tracekit.learner.reference import Reference
from tracekit.learner.tokens import TokenTable
from tracekit.log import Timer
from tracekit.objectives import LossBatch, LossOutput, Objective, StepTotals, compute_advantages
from tracekit.objectives.filters import overlong_mask
from tracekit.objectives.gae import Moments, gae, token_rewards, value_loss, whiten
from tracekit.objectives.metrics import Metrics
from tracekit.rollout.protocol import Rollouts


@dataclass(kw_only=True, slots=True)
class Experience:
    """Rollouts with all that the update knows of them. Arrays are by rollout row."""

    rollouts: Rollouts
    rewards: np.ndarray
    """float32 [N]: what the advantages are made of, length penalty included."""
    reader: GuidanceReader | None
    """The step's guidance; None where nothing is recorded."""
    tokens: TokenTable
    """`logp_old`, and `logp_ref`, `values` and `returns` for the objectives that read them."""
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [N], or [N, R] from gae; empty until they are computed."""

    @classmethod
    def of(cls, rollouts: Rollouts, rewards: np.ndarray, reader: GuidanceReader | None) -> Experience:
        """Before any pass of the learner."""
        return cls(rollouts=rollouts, rewards=rewards, reader=reader, tokens=TokenTable(rollouts))


@dataclass(kw_only=True, slots=True)
class MiniStep:
    """What one optimizer step reports."""

    grad_norm: float
    metrics: Metrics
    critic_grad_norm: float | None = None


class Update:
    """Passes of the learner, the reference and the critic over packed microbatches."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        objective: Objective,
        *,
        static_scales: dict[str, torch.Tensor] | None,
        sites: list[str],
        pad_id: int,
        timer: Timer,
        critic: Critic | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.config, self.learner, self.objective = config, learner, objective
        self.static_scales, self.sites, self.pad_id, self.timer = static_scales, sites, pad_id, timer
        self.critic, self.reference = critic, reference

    # -- microbatches

    def batches(self, rollouts: Rollouts, advantages: np.ndarray, which: np.ndarray) -> Iterator[Microbatch]:
        """Packed microbatches of the rows `which`."""
        c = self.config
        return microbatches(
            rollouts,
            advantages,
            which=which,
            row_len=c.optim.row_len,
            max_tokens=c.optim.microbatch_tokens,
            pad_id=self.pad_id,
            replay=c.replay.routing == "r3",
            device=self.learner.device,
        )

    def guide(self, batch: Microbatch, x: Experience) -> Guide:
        """The guide of one microbatch; its records come from the store."""
        records = {}
        if x.reader is not None:
            with self.timer.section("guidance_read"):
                records = load_records(x.reader, batch, x.rollouts, self.sites)
        return Guide(
            profiles=profiles(self.config),
            static_scales=self.static_scales,
            rounding=self.config.guidance.rounding,
            records=records,
            routes=batch.routes,
        )

    def loss_batch(self, batch: Microbatch, x: Experience) -> LossBatch:
        """The objective's view of a microbatch, without what the current weights say."""
        rollouts, device = x.rollouts, batch.mask.device
        mask = batch.mask
        if self.config.algo.overlong_filter:
            cut = torch.from_numpy(~rollouts.finished[batch.rows]).to(device)
            mask = overlong_mask(mask, cut, batch.segment_ids)
        lag = self.learner.version - rollouts.version
        return LossBatch(
            logp=None,
            logp_old=x.tokens.get("logp_old", batch),
            logp_mu=batch.logp_mu,
            advantages=batch.advantages,
            mask=mask,
            segment_ids=batch.segment_ids,
            n_segments=len(batch.rows),
            group=torch.from_numpy(rollouts.group[batch.rows]).to(device),
            logp_ref=x.tokens.get("logp_ref", batch),
            values_old=x.tokens.get("values", batch),
            returns=x.tokens.get("returns", batch),
            logp_mu_topk=batch.topk_logp if self.objective.needs_topk else None,
            version_lag=torch.full((len(batch.rows),), lag, device=device),
        )

    def whole_batch(self, x: Experience, *, filtered: bool = True) -> LossBatch:
        """All of `x` padded, [N, R], as `Objective.begin_batch` reads it. `filtered` leaves out what the loss does."""
        rollouts = x.rollouts
        mask = rollouts.sampled
        if filtered and self.config.algo.overlong_filter:
            mask = mask & rollouts.finished[:, None]
        return LossBatch(
            logp=None,
            logp_old=torch.from_numpy(x.tokens.values["logp_old"]),
            logp_mu=torch.from_numpy(rollouts.logp_mu),
            advantages=torch.zeros(mask.shape),
            mask=torch.from_numpy(mask),
            group=torch.from_numpy(rollouts.group),
        )

    # -- the pass that opens a batch

    @torch.no_grad()
    def open(self, x: Experience, audit: StepAudit | None = None) -> dict[str, float]:
        """Fill `x.tokens` at the weights that the engine sampled with, by the guided path: `logp_old`, and what a
        reference and a critic say. `audit` is shown the activations. Returns metrics of what guidance changed."""
        temperature = self.config.rollout.temperature
        flips: dict[str, float] = {}
        decoded: dict[str, int] = {}
        gaps = SiteGaps() if self.config.log.by_layer else None
        for batch in self.batches(x.rollouts, np.zeros(len(x.rewards), np.float32), np.arange(len(x.rewards))):
            guide = self.guide(batch, x)
            guide.flips = {} if not flips and guide.records else None
            guide.decoded = decoded
            if audit is not None:
                audit.begin(batch.token_uid)
                guide.audit = audit
            if gaps is not None:
                gaps.real, guide.gaps = (batch.token_uid >= 0).reshape(-1), gaps
            with self.timer.section("logp_old"):
                with guided(guide):
                    hidden = self.learner.hidden(batch)
                said = self.learner.logprobs(hidden, batch, temperature=temperature)
                x.tokens.put("logp_old", batch, said.logp)
            if guide.flips:
                flips = {"guidance/flip_rate": float(torch.stack(list(guide.flips.values())).mean())}
            guide.flips = guide.gaps = guide.decoded = guide.audit = None
            if self.reference is not None:
                with self.timer.section("logp_ref"):
                    x.tokens.put("logp_ref", batch, self.reference.logp(batch, guide, temperature=temperature)[0])
            if self.critic is not None:
                with self.timer.section("critic"):
                    x.tokens.put("values", batch, self.critic.values(batch, hidden))
        if rows := decoded.pop("rows", 0):
            flips |= {f"guidance/{name}_frac": count / rows for name, count in decoded.items()}
        return flips | (gaps.metrics() if gaps is not None else {})

    def advantages(self, x: Experience) -> None:
        """Set `x.advantages`, and the critic's targets where there is one."""
        algo, rewards = self.config.algo, torch.from_numpy(x.rewards)
        if not self.objective.needs_values:
            group = torch.from_numpy(x.rollouts.group)
            x.advantages = compute_advantages(self.objective.advantage, rewards, group, std=algo.adv_std).numpy()
            return
        mask = torch.from_numpy(x.rollouts.sampled)
        values = torch.from_numpy(x.tokens.values["values"])
        kl = None
        if algo.kl_reward_coef:
            kl = torch.from_numpy(x.tokens.values["logp_old"] - x.tokens.values["logp_ref"])
        each = token_rewards(rewards, mask, kl=kl, kl_coef=algo.kl_reward_coef)
        raw, returns = gae(each, values, mask, gamma=algo.gae_gamma, lam=algo.gae_lambda)
        x.tokens.values["returns"] = returns.numpy()
        x.advantages = whiten(raw, mask, Moments.of(raw, mask)).numpy()

    # -- mini-steps

    def mini_step(self, x: Experience, which: np.ndarray) -> MiniStep:
        """One optimizer step, of the critic too, on the rows `which`."""
        batches = list(self.batches(x.rollouts, x.advantages, which))
        totals = self.totals(batches, x)
        nonfinite, metrics = 0, Metrics()
        for batch in batches:
            guide = self.guide(batch, x)
            view = self.loss_batch(batch, x).with_(totals=totals)
            with self.timer.section("forward_backward"):
                outs = self.backward(batch, guide, view)
            if self.critic is not None and self.critic.network is not None:
                with self.timer.section("critic"):
                    outs.append(self.value_loss(view, self.critic.values(batch, None)))
                    outs[-1].loss.backward()
            for out in outs:
                nonfinite += int(out.nonfinite or 0)
                metrics.merge(out.metrics)
        c, critic_norm = self.config.optim, None
        with self.timer.section("optimizer"):
            if self.critic is not None:
                critic_norm = self.critic.optimizer_step(c.max_grad_norm, skip=nonfinite > 0)
            norm = self.learner.optimizer_step(c.max_grad_norm, skip=nonfinite > 0)
        return MiniStep(grad_norm=norm, metrics=metrics, critic_grad_norm=critic_norm)

    def totals(self, batches: list[Microbatch], x: Experience) -> StepTotals:
        """Denominators of one optimizer step; a pass without graph comes first where they depend on the weights."""
        views = [self.loss_batch(batch, x) for batch in batches]
        if self.objective.totals_need_logp:
            with torch.no_grad(), self.timer.section("forward_backward"):
                temperature = self.config.rollout.temperature
                for i, batch in enumerate(batches):
                    logp, _ = self.learner.logp(batch, self.guide(batch, x), temperature=temperature)
                    views[i] = views[i].with_(logp=logp)
        return self.objective.totals(views)

    def backward(self, batch: Microbatch, guide: Guide, view: LossBatch) -> list[LossOutput]:
        """Gradient of one microbatch, of a shared critic too: the policy's output, then the critic's.

        With `optim.logit_chunk_tokens` in two passes over the head (the objective's coefficients), else by autograd
        over whole logits. The network below the head runs once either way.
        """
        options = {
            "temperature": self.config.rollout.temperature,
            "entropy_grad": self.objective.needs_entropy,
            "topk": bool(self.objective.needs_topk),
        }
        shared = self.critic is not None and self.critic.network is None
        size = self.config.optim.logit_chunk_tokens
        with guided(guide):
            hidden = self.learner.hidden(batch)
            if not size:
                said = self.learner.logprobs(hidden, batch, **options)
                out = self.objective(view.with_(logp=said.logp, entropy=said.entropy, logp_topk=said.topk))
                outs = [out, self.value_loss(view, self.critic.of(hidden))] if shared else [out]
                sum(o.loss for o in outs).backward()
                return outs
            pieces = chunks(batch.mask, size)
            own = hidden.flatten(0, 1)[torch.cat(pieces)]
            out, gradient = chunked_backward(
                self.objective,
                view,
                own,
                pieces,
                lambda h, piece: self.learner.piece_logprobs(h, batch, piece, **options),
            )
            outs = [out]
            if shared:
                leaf = own.detach().requires_grad_()
                values = scatter(batch.mask.shape, pieces, [self.critic.of(leaf)])
                outs.append(self.value_loss(view, values))
                outs[1].loss.backward()
                gradient = gradient if leaf.grad is None else gradient + leaf.grad
            own.backward(gradient)
        return outs

    def value_loss(self, view: LossBatch, values: torch.Tensor) -> LossOutput:
        """The critic's clipped loss on a microbatch."""
        return value_loss(view.with_(values=values), clip=self.config.algo.value_clip)
