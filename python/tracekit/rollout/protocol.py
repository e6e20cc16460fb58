"""What the trainer and an engine exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tracekit.numerics import Quantized


@dataclass(kw_only=True, slots=True)
class PublishedWeights:
    """The weights of one policy version, as the sampler holds them.

    `dense` has BF16 tensors by torchtitan name; `experts` the routed experts' [E, out, in], packed where they are
    quantised and BF16 where they are not.
    """

    version: int
    dense: dict[str, torch.Tensor]
    experts: dict[str, Quantized | torch.Tensor]


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """Responses of one step, a row each, grouped by prompt: rows g*G to g*G+G-1 share prompt g.

    Position t of a row is the t-th token of prompt plus response; the last sampled token was never fed back, so
    routes and guidance cover positions 0 to prompt_len + response_len - 2.
    """

    tokens: np.ndarray
    """int64 [N, T], right-padded."""
    prompt_len: np.ndarray
    """int64 [N]."""
    response_len: np.ndarray
    """int64 [N]."""
    logp_mu: np.ndarray
    """float32 [N, R]: log-prob of each sampled token at the sampling temperature, over the whole vocabulary."""
    routes: np.ndarray
    """uint8 [N, T, layers, top_k]: expert ids of each input position."""
    finished: np.ndarray
    """bool [N]: ended by itself (False: cut by length)."""
    group: np.ndarray
    """int64 [N]: prompt of each row."""
    version: int
    """Policy version that sampled all of it."""
    trajectory: list[str] = field(default_factory=list)
    """Id of each row in the guidance store; empty where nothing was recorded."""
    topk_ids: np.ndarray | None = None
    """int32 [N, R, K]: the sampler's most likely tokens where each token was sampled, if it was asked for them."""
    topk_logp: np.ndarray | None = None
    """float32 [N, R, K]: their log-probs, as `logp_mu`."""

    @property
    def n_input(self) -> np.ndarray:
        """int64 [N]: input positions of each row, those that the sampler computed."""
        return self.prompt_len + self.response_len - 1

    @property
    def sampled(self) -> np.ndarray:
        """bool [N, R]: where `logp_mu` has a token."""
        return np.arange(self.logp_mu.shape[1]) < self.response_len[:, None]

    def select(self, keep: np.ndarray) -> Rollouts:
        """The rows `keep` (bool [N] or indices), prompts renumbered in their order; siblings must stay together."""
        arrays = {name: x[keep] for name, x in self._arrays().items()}
        _, arrays["group"] = np.unique(arrays["group"], return_inverse=True)
        names = np.array(self.trajectory, object)[keep].tolist() if self.trajectory else []
        return Rollouts(**arrays, version=self.version, trajectory=names)

    @classmethod
    def concat(cls, parts: list[Rollouts]) -> Rollouts:
        """The rows of `parts`, all of one policy version, one after another; prompts renumbered."""
        if len(parts) == 1:
            return parts[0]
        if len({part.version for part in parts}) > 1:
            raise ValueError("rollouts of several policy versions cannot be one batch of a single version")
        width = max(part.tokens.shape[1] for part in parts)
        columns = [part._arrays() for part in parts]
        for c in columns:
            for name in ("tokens", "routes"):
                pad = [(0, 0)] * c[name].ndim
                pad[1] = (0, width - c[name].shape[1])
                c[name] = np.pad(c[name], pad)
        offset = np.cumsum([0, *(int(part.group.max()) + 1 for part in parts[:-1])])
        arrays = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
        arrays["group"] = np.concatenate([part.group + at for part, at in zip(parts, offset, strict=True)])
        names = [name for part in parts for name in part.trajectory]
        return cls(**arrays, version=parts[0].version, trajectory=names)

    def _arrays(self) -> dict[str, np.ndarray]:
        names = ("tokens", "prompt_len", "response_len", "logp_mu", "routes", "finished", "group")
        more = [name for name in ("topk_ids", "topk_logp") if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in (*names, *more)}


class Engine(Protocol):
    """A sampler. One engine serves one policy version at a time."""

    version: int

    def load(self, weights: PublishedWeights) -> None:
        """Serve `weights` from now on."""

    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int,
        temperature: float,
        max_response_len: int,
        seed: int,
        topk: int = 0,
    ) -> Rollouts:
        """`group_size` responses to each prompt; temperature 0 is greedy. `topk`: also return this many of the most
        likely tokens at each position (at most the vocabulary)."""
