"""A task: training problems without end of order, held-out problems, and their grader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tracekit.config.schema import Config, TaskConfig
from tracekit.errors import ConfigError
from tracekit.tasks import gym
from tracekit.tasks.tokenizer import CharTokenizer

_ATTEMPTS = 200  # draws for one training problem that is not held out, before the space counts as used up


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `entry` is reasoning-gym's own record, which its grader reads."""

    prompt: str
    answer: str
    entry: dict[str, Any]


class Task:
    """`train[i]` and `eval[i]` are Problems; no held-out prompt is among the training prompts.

    Held-out problems are distinct, and the same for every seed, so that runs compare. Training problems are made
    when they are asked for, depend on (task, seed, index) only, and may repeat where the space is small.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.config = config
        held_out = gym.dataset(config.name, config.params, seed=_seed(config, "eval"), size=config.eval_size)
        self._source = gym.dataset(config.name, config.params, seed=_seed(config, seed), size=config.train_size)
        self.eval: Sequence[Problem] = _distinct(held_out, config.eval_size)
        self._held_out = {problem.prompt for problem in self.eval}
        self.train: Sequence[Problem] = _Lazy(config.train_size, self._train_problem)
        _ = self.train[0]

    def grade(self, problem: Problem, response: str) -> float:
        """1.0 if the data set's own grader gives `response` full marks, else 0.0; part marks do not count."""
        return 1.0 if self.score(problem, response) >= 1.0 else 0.0

    def score(self, problem: Problem, response: str) -> float:
        """What the data set's own grader gives, part marks included, in [0, 1]."""
        return float(self._source.score_answer(response, problem.entry))

    @property
    def fingerprint(self) -> str:
        """Hash of the held-out problems and the first training problems: equal for equal tasks and seeds."""
        seen = [*self.eval, *(self.train[i] for i in range(min(64, len(self.train))))]
        text = json.dumps([[problem.prompt, problem.answer] for problem in seen])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _train_problem(self, index: int) -> Problem:
        for attempt in range(_ATTEMPTS):
            try:
                entry = self._source[index + attempt * self.config.train_size]
            except IndexError:  # a data set that ends at its size: another of its problems stands in
                entry = self._source[(index + attempt) % self.config.train_size]
            problem = _problem(entry)
            if problem.prompt not in self._held_out:
                return problem
        raise ConfigError(
            f"task {self.config.name} with {self.config.params} has no problem left to train on beside "
            f"task.eval_size = {self.config.eval_size}; lower it, or widen task.params"
        )


class _Lazy(Sequence):
    """A sequence of `size` items, each made on demand."""

    def __init__(self, size: int, make: Callable[[int], Problem]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._make(index % self._size)

    def __iter__(self) -> Iterator[Problem]:
        return (self._make(index) for index in range(self._size))


def load_task(config: TaskConfig, seed: int) -> Task:
    """The task of `config`. Raises ConfigError for a name or parameters that reasoning-gym rejects."""
    return Task(config, seed)


def check_fits(task: Task, tokenizer: CharTokenizer, config: Config, samples: int = 500) -> tuple[float, float]:
    """Refuse a task whose answers or prompts cannot fit, judged by the held-out and the first `samples` problems.

    Returns the mean lengths of a prompt and of an answer with its EOS, in tokens.
    Raises ConfigError naming the key to raise.
    """
    seen = [*task.eval, *(task.train[i] for i in range(min(samples, len(task.train))))]
    prompts = [len(tokenizer.encode_prompt(problem.prompt)) for problem in seen]
    answers = [len(tokenizer.encode(problem.answer)) + 1 for problem in seen]
    if max(answers) > config.rollout.max_response_len:
        raise ConfigError(
            f"rollout.max_response_len = {config.rollout.max_response_len}: {task.config.name} has answers of "
            f"{max(answers)} tokens with the EOS; raise it to at least that"
        )
    if max(prompts) + config.rollout.max_response_len > config.model.max_seq_len:
        raise ConfigError(
            f"model.max_seq_len = {config.model.max_seq_len}: {task.config.name} has prompts of {max(prompts)} tokens, "
            f"and a response takes up to {config.rollout.max_response_len}; raise it to at least their sum"
        )
    return sum(prompts) / len(seen), sum(answers) / len(seen)


def _problem(entry: dict[str, Any]) -> Problem:
    if not isinstance(entry["answer"], str):
        raise ConfigError(f"task: this data set has no single answer text (found {entry['answer']!r}); take another")
    return Problem(_short(entry), entry["answer"], entry)


def _short(entry: dict[str, Any]) -> str:
    """`12+345=` where the question is an expression in words around it; else the question itself."""
    expression = entry["metadata"].get("expression")
    if isinstance(expression, str) and expression and expression in entry["question"]:
        return expression.replace(" ", "") + "="
    return entry["question"]


def _distinct(source: Any, count: int) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for index in range(count * 20 + 100):
        problem = _problem(source[index])
        problems.setdefault(problem.prompt, problem)
        if len(problems) == count:
            return list(problems.values())
    raise ConfigError(
        f"task.eval_size = {count}: only {len(problems)} distinct problems were found; lower it, or widen task.params"
    )


def _seed(config: TaskConfig, stream: int | str) -> int:
    """Seeds far apart: reasoning-gym seeds item i with seed + i, so neighbouring seeds would share their items."""
    text = json.dumps([config.name, config.params, stream], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
