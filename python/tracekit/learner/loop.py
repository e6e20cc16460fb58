"""The RL loop: sample, record, reward, guided update, publish."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracekit.config import guided_sites
from tracekit.config.schema import Config
from tracekit.guidance import open_dataset
from tracekit.learner.audits import StepAudit, add_audits, audit_metrics, write_audits
from tracekit.learner.critic import Critic
from tracekit.learner.engines import start_engine
from tracekit.learner.learner import Learner
from tracekit.learner.reference import Reference
from tracekit.learner.retention import Retention
from tracekit.learner.sampling import Sampled, Sampler, step_seed
from tracekit.learner.state import LoopState
from tracekit.learner.update import Experience, MiniStep, Update
from tracekit.log import Timer
from tracekit.objectives import Objective, from_config
from tracekit.objectives.metrics import Metrics
from tracekit.runs import RunFolder

OF_ONE_STEP = ("policy/loss", "policy/tokens", "policy/responses", "critic/loss")
"""Sums over one optimizer step: over several mini-steps their mean is reported."""
BY_MINI_STEP = ("policy/loss", "policy/ratio_max", "policy/clip_frac", "policy/approx_kl", "correction/drop_frac")
"""What is also reported of each mini-step, as `mini_step/{i}/*`."""


class Loop:
    """The engine and the learner take turns."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        learner: Learner,
        task: Any,
        tokenizer: Any,
        state: LoopState,
        *,
        objective: Objective | None = None,
        critic: Critic | None = None,
        reference: Reference | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """`critic` and `reference` must be given where the objective needs them; `note` shows a person a
        line."""
        self.config, self.run, self.learner, self.task, self.state = config, run, learner, task, state
        self.note = note
        self.timer = Timer()
        scales = {site: torch.tensor(g, device=learner.device) for site, g in state.static_scales.items()}
        static_scales = scales if config.quant.global_scale == "static" else None
        sites = [site.name for site in guided_sites(config)]
        self.retention = Retention(config.guidance, run.guidance, note)
        self.retention.adopt(state.step, state.guidance_bytes)
        self.engine = start_engine(config, run, learner, tokenizer, static_scales=static_scales)
        self.objective = objective or from_config(config.algo, config.rollout)
        if state.objective:
            self.objective.load_state_dict(state.objective)
        self.sampler = Sampler(
            config,
            run,
            self.engine,
            task,
            tokenizer,
            static_scales=static_scales,
            sites=sites,
            topk=self.objective.needs_topk,
            timer=self.timer,
        )
        self.update = Update(
            config,
            learner,
            self.objective,
            static_scales=static_scales,
            sites=sites,
            pad_id=tokenizer.pad_id,
            timer=self.timer,
            critic=critic,
            reference=reference,
        )
        self._advised: set[bool] = set()

    def step(self, draw: Callable[[int], Sequence[Any]], step: int) -> dict[str, Any]:
        """One RL step on prompts from `draw(count)`. Returns its metrics."""
        c = self.config
        self.timer.take()  # checkpoints and evaluations between steps are not the step's
        folders = [self.sampler.folder(step)]
        if self.sampler.sites:
            self.retention.wait_room(self.state.guidance_bytes)
        if self.objective.state.x is None and c.algo.x_baseline_prompts:
            self.measure_baseline()
            folders.append(self.sampler.folder(0))
        sampled = self.sampler.fill(draw, step)
        if c.log.rollouts:
            self.sampler.write_rollouts(sampled, step)
        x, opened = self.experience(sampled, step)
        mini_steps, whole = [], Metrics()
        order = np.random.default_rng(step_seed(c.seed, step)).permutation(c.rollout.prompts_per_step)
        for i, part in enumerate(np.array_split(order, c.algo.mini_steps)):
            done = self.update.mini_step(x, np.flatnonzero(np.isin(x.rollouts.group, part)))
            self.advise(done.metrics, i)
            mini_steps.append(done)
            whole.merge(done.metrics)
        self.learner.version += 1
        self.state.version = self.learner.version
        with self.timer.section("publish"):
            self.engine.load(self.learner.publish())
        self.state.objective = self.objective.state_dict()
        if c.log.histograms:
            self.write_histograms(whole, step)
        out = self.rewards(sampled) | _merged(mini_steps, whole) | opened
        if self.sampler.sites:
            out["guidance/bytes_per_token"] = self.sampler.guidance_bytes / self.sampler.recorded_tokens
            self.state.guidance_bytes = max(self.state.guidance_bytes, self.sampler.guidance_bytes)
            coming = self.state.guidance_bytes if step < c.steps else 0
            out |= self.retention.read(step, folders, coming)
        return out | self.timer.take()

    def experience(self, sampled: Sampled, step: int) -> tuple[Experience, dict[str, float]]:
        """The rows that enter the update, opened: log-probs, advantages, and the discrepancies X and Y measured."""
        reader = open_dataset(self.sampler.folder(step)) if self.sampler.sites else None
        kept, rewards = sampled.rollouts, sampled.rewards
        if not sampled.keep.all():
            kept, rewards = kept.select(sampled.keep), rewards[sampled.keep]
        x = Experience.of(kept, rewards, reader)
        audit = StepAudit(reader, kept) if reader and self.config.guidance.audit_every else None
        opened = self.update.open(x, audit)
        if audit is not None:
            opened |= self.audited(audit, step)
        self.update.advantages(x)
        reference = None
        filtered = self.config.algo.overlong_filter or not sampled.keep.all()
        if self.objective.state.x is None and filtered:  # X is of the responses before any filter
            everything = x
            if not sampled.keep.all():
                everything = Experience.of(sampled.rollouts, sampled.rewards, reader)
                self.update.open(everything)
            reference = [self.update.whole_batch(everything, filtered=False)]
        self.objective.begin_batch([self.update.whole_batch(x)], reference=reference)
        return x, opened

    def audited(self, audit: StepAudit, step: int) -> dict[str, float]:
        """Metrics of a step's audited tokens; the run's sums go to `logs/audits.json`."""
        with self.timer.section("audit"):
            sites = audit.finish()
            add_audits(self.state.audits, sites)
            if sites:
                write_audits(self.run.audits, step, self.state.audits)
        return audit_metrics(sites)

    def measure_baseline(self) -> None:
        """X on held-out problems, before anything is trained; their guidance is step 0's."""
        problems = [self.task.eval[i] for i in range(self.config.algo.x_baseline_prompts)]
        rollouts, accuracy = self.sampler.sample(problems, 0)
        x = Experience.of(rollouts, accuracy, open_dataset(self.sampler.folder(0)) if self.sampler.sites else None)
        self.update.open(x)
        whole = self.update.whole_batch(x, filtered=False)
        self.objective.begin_batch([whole], reference=[whole])

    def close(self) -> None:
        """End an engine that has processes of its own."""
        if hasattr(self.engine, "shutdown"):
            self.engine.shutdown()

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out problems, in the quantised engine."""
        return self.sampler.evaluate()

    # -- what a person is shown

    def advise(self, metrics: Metrics, mini_step: int) -> None:
        """Show the objective's advice, each kind (about a first mini-step, about a later one) once."""
        kind = mini_step == 0
        if kind not in self._advised and (text := self.objective.advice(metrics, mini_step)):
            self._advised.add(kind)
            self.note(text)

    def rewards(self, sampled: Sampled) -> dict[str, float]:
        """Reward, length and sampling of a step, over all its responses."""
        r = sampled.rollouts
        out = {
            "reward/mean": float(sampled.accuracy.mean()),
            "reward/accuracy": float((sampled.accuracy >= 1).mean()),
            "response_length/mean": float(r.response_len.mean()),
            "response_length/clip_ratio": float(1 - r.finished.mean()),
        }
        if self.config.algo.overlong_buffer:
            out["reward/shaped_mean"] = float(sampled.rewards.mean())
        if self.config.algo.dynamic_sampling:
            groups = len(np.unique(r.group))
            out["sampling/rounds"] = sampled.rounds
            out["sampling/kept_frac"] = len(np.unique(r.group[sampled.keep])) / groups
        return out

    def write_histograms(self, metrics: Metrics, step: int) -> None:
        """One line of `logs/histograms.jsonl`: each histogram of the step with its edges and clip lines."""
        with open(histograms_file(self.run), "a") as file:
            file.write(json.dumps({"step": step, **metrics.histograms()}) + "\n")


def histograms_file(run: RunFolder) -> Path:
    """Where the histograms of a run are."""
    return run.logs / "histograms.jsonl"


def trim_histograms(run: RunFolder, step: int) -> None:
    """Leave out the lines of steps after `step`, which a resumed run takes again, and a torn last one."""
    path = histograms_file(run)
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(f"{line}\n" for line in kept))
    partial.replace(path)


def _merged(mini_steps: list[MiniStep], whole: Metrics) -> dict[str, float]:
    """Metrics over all mini-steps, and the few that are worth seeing of each."""
    each = [done.metrics.finalize() for done in mini_steps]
    out = {"actor/grad_norm": float(np.mean([done.grad_norm for done in mini_steps])), **whole.finalize()}
    for name in OF_ONE_STEP:
        if name in out:
            out[name] = float(np.mean([values[name] for values in each]))
    critic = [done.critic_grad_norm for done in mini_steps if done.critic_grad_norm is not None]
    if critic:
        out["critic/grad_norm"] = float(np.mean(critic))
    for i, values in enumerate(each):
        out[f"mini_step/{i}/grad_norm"] = mini_steps[i].grad_norm
        for name in BY_MINI_STEP:
            if name in values:
                out[f"mini_step/{i}/{name.rpartition('/')[2]}"] = values[name]
    return out
