"""From prompts to a batch of graded rollouts: sampling rounds, DAPO's filter and length penalty, the record on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracekit.config.schema import Config
from tracekit.log import Timer
from tracekit.objectives.filters import DynamicSampling, overlong_penalty
from tracekit.rollout.cache import Capture
from tracekit.rollout.protocol import Engine, Rollouts
from tracekit.rollout.record import make_schema, write_guidance
from tracekit.runs import RunFolder


@dataclass(kw_only=True, slots=True)
class Sampled:
    """What one step sampled, by row of `rollouts`, in all rounds."""

    rollouts: Rollouts
    problems: list[Any]
    """Problem of each group."""
    accuracy: np.ndarray
    """float32 [N]: the task's own score."""
    rewards: np.ndarray
    """float32 [N]: the score and the length penalty."""
    keep: np.ndarray
    """bool [N]: rows that enter the update."""
    rounds: int = 1


class Sampler:
    """Asks the engine, grades, records guidance."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        engine: Engine,
        task: Any,
        tokenizer: Any,
        *,
        static_scales: dict[str, torch.Tensor] | None,
        sites: list[str],
        topk: int,
        timer: Timer,
    ) -> None:
        self.config, self.run, self.engine, self.task, self.tokenizer = config, run, engine, task, tokenizer
        self.static_scales, self.sites, self.topk, self.timer = static_scales, sites, topk, timer
        self.guidance_bytes = self.recorded_tokens = 0

    def folder(self, step: int) -> Path:
        """Where the records of one step lie."""
        return self.run.guidance / f"step_{step:06d}"

    def fill(self, draw: Callable[[int], Sequence[Any]], step: int) -> Sampled:
        """A batch of `rollout.prompts_per_step` prompts from `draw(count)`; with `algo.dynamic_sampling` as many
        rounds as it takes to fill it with prompts whose responses differ in accuracy.

        Raises DataError when `algo.max_sampling_rounds` do not.
        """
        algo, count = self.config.algo, self.config.rollout.prompts_per_step
        filter_ = DynamicSampling(prompts=count, max_rounds=algo.max_sampling_rounds) if algo.dynamic_sampling else None
        shutil.rmtree(self.folder(step), ignore_errors=True)  # what a killed process left of this step
        parts, problems, scores, keeps = [], [], [], []
        while True:
            drawn = list(draw(count))
            rollouts, accuracy = self.sample(drawn, step, first_prompt=len(problems))
            parts.append(rollouts)
            problems += drawn
            scores.append(accuracy)
            if filter_ is None:
                keeps.append(np.ones(len(accuracy), bool))
                break
            keep = filter_.add(torch.from_numpy(accuracy), torch.from_numpy(rollouts.group))
            keeps.append(keep.numpy())
            if filter_.full:
                break
        rollouts, accuracy, keep = Rollouts.concat(parts), np.concatenate(scores), np.concatenate(keeps)
        surplus = np.unique(rollouts.group[keep])[count:]
        keep &= ~np.isin(rollouts.group, surplus)
        rewards = accuracy
        if algo.overlong_buffer:
            penalty = overlong_penalty(
                torch.from_numpy(rollouts.response_len),
                max_length=self.config.rollout.max_response_len,
                buffer=algo.overlong_buffer,
                factor=algo.overlong_penalty,
            )
            rewards = accuracy + penalty.numpy()
        return Sampled(
            rollouts=rollouts, problems=problems, accuracy=accuracy, rewards=rewards, keep=keep, rounds=len(parts)
        )

    def sample(self, problems: Sequence[Any], step: int, *, first_prompt: int = 0) -> tuple[Rollouts, np.ndarray]:
        """Responses to `problems` and their scores [N]; records guidance when there is a site to record.

        `first_prompt` is the number within the step of the first of them: another round has other seeds and ids.
        """
        r = self.config.rollout
        prompts = [self.tokenizer.encode_prompt(p.prompt) for p in problems]
        options = {
            "group_size": r.group_size,
            "temperature": r.temperature,
            "max_response_len": r.max_response_len,
            "seed": (step_seed(self.config.seed, step) + 7919 * first_prompt) & 0x7FFFFFFF,
            "topk": self.topk,
        }
        writes_itself = getattr(self.engine, "writes_guidance", False)
        capture = Capture(sites=self.sites) if self.sites and not writes_itself else None
        if writes_itself:
            options["step"] = self.folder(step).name
            options["names"] = self.names(step, first_prompt, len(prompts)) if self.sites else ()
        else:
            self.engine.capture = capture
        with self.timer.section("rollout"):
            rollouts = self.engine.generate(prompts, **options)
        if not writes_itself:
            self.engine.capture = None
        with self.timer.section("reward"):
            accuracy = self.grade(problems, rollouts)
        first = np.arange(0, len(rollouts.group), r.group_size)
        if capture:
            with self.timer.section("guidance_write"):
                write_guidance(
                    self.folder(step),
                    make_schema(self.config, self.static_scales),
                    capture,
                    rollouts,
                    step=step,
                    encoding=self.config.guidance.encoding,
                    first_prompt=first_prompt,
                    audit_every=self.config.guidance.audit_every,
                )
            tokens = int(rollouts.prompt_len[first].sum() + (rollouts.response_len - 1).sum())
        else:
            tokens = int(rollouts.n_input.sum())
        if self.sites:
            self.guidance_bytes = sum(f.stat().st_size for f in self.folder(step).rglob("*") if f.is_file())
            self.recorded_tokens = tokens + (self.recorded_tokens if first_prompt else 0)
        return rollouts, accuracy

    def names(self, step: int, first_prompt: int, prompts: int) -> list[str]:
        """The trajectory of each row of a round, for engines that record themselves."""
        size = self.config.rollout.group_size
        return [f"{step:06d}.{first_prompt + p:04d}.{i:02d}" for p in range(prompts) for i in range(size)]

    def grade(self, problems: Sequence[Any], rollouts: Rollouts) -> np.ndarray:
        """Score of each row, float32 [N]. A response that was cut by length has no answer."""
        out = np.zeros(len(rollouts.group), np.float32)
        for row, g in enumerate(rollouts.group):
            if rollouts.finished[row]:
                out[row] = self.task.grade(problems[g], self.tokenizer.decode(self.response(rollouts, row)))
        return out

    def response(self, rollouts: Rollouts, row: int) -> np.ndarray:
        """Sampled token ids of a row."""
        start = int(rollouts.prompt_len[row])
        return rollouts.tokens[row, start : start + int(rollouts.response_len[row])]

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out problems, in the quantised engine."""
        problems = [self.task.eval[i] for i in range(self.config.task.eval_size)]
        prompts = [self.tokenizer.encode_prompt(p.prompt) for p in problems]
        rollouts = self.engine.generate(
            prompts, group_size=1, temperature=0, max_response_len=self.config.rollout.max_response_len, seed=0
        )
        return float(self.grade(problems, rollouts).mean())

    def write_rollouts(self, sampled: Sampled, step: int) -> None:
        """`rollouts/step_XXXXXX.jsonl`, a line a response, for a person to read."""
        r = sampled.rollouts
        path = self.run.rollouts / f"step_{step:06d}.jsonl"
        partial = path.with_suffix(".tmp")
        with open(partial, "w") as file:
            for row, g in enumerate(r.group):
                line = {
                    "trajectory": r.trajectory[row] if r.trajectory else None,
                    "version": r.version,
                    "prompt": sampled.problems[g].prompt,
                    "response": self.tokenizer.decode(self.response(r, row)),
                    "answer": sampled.problems[g].answer,
                    "finished": bool(r.finished[row]),
                    "accuracy": float(sampled.accuracy[row]),
                    "reward": float(sampled.rewards[row]),
                    "logp_mu": float(r.logp_mu[row, : r.response_len[row]].sum()),
                    "tokens": int(r.response_len[row]),
                    "kept": bool(sampled.keep[row]),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.replace(path)


def step_seed(seed: int, step: int) -> int:
    """Seed of everything that step `step` draws."""
    return (seed * 1_000_003 + step) & 0x7FFFFFFF
