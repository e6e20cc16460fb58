"""Which responses enter an update: DAPO's dynamic sampling, overlong shaping and overlong filtering.

Source: DAPO, arXiv 2503.14476 (dynamic sampling; soft overlong punishment with L_max 20480, a buffer of 4096 and factor
1); refilling and its limit as in verl's `filter_groups`.
"""

import torch
from torch import Tensor

from tracekit.errors import ConfigError, DataError


def informative_groups(accuracy: Tensor, group: Tensor) -> Tensor:
    """[N] bool: responses whose prompt has both different accuracies among its responses.

    accuracy [N]: the task's own score, before any shaping (an overlong penalty makes an all-correct group look mixed).
    """
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    a = accuracy.double()
    low = a.new_full((size.numel(),), torch.inf).scatter_reduce(0, index, a, "amin")
    high = a.new_full((size.numel(),), -torch.inf).scatter_reduce(0, index, a, "amax")
    return (high > low)[index]


class DynamicSampling:
    """Counts usable prompts over generation rounds until the batch is full.

        sampling = DynamicSampling(prompts=64, max_rounds=10)
        while not sampling.full:
            keep = sampling.add(accuracy, group)

    Measure ACRL's X on the responses before this filter (`Objective.begin_batch(…, reference=…)`).
    """

    def __init__(self, *, prompts: int, max_rounds: int = 10):
        if prompts < 1 or max_rounds < 1:
            raise ConfigError(f"dynamic sampling: prompts={prompts} and max_rounds={max_rounds} must be at least 1")
        self.prompts, self.max_rounds = prompts, max_rounds
        self.rounds = self.seen = self.usable = 0

    @property
    def full(self) -> bool:
        """Whether enough usable prompts have been seen."""
        return self.usable >= self.prompts

    @property
    def dropped_frac(self) -> float:
        """Share of the prompts seen that were dropped."""
        return 1 - self.usable / self.seen if self.seen else 0.0

    def add(self, accuracy: Tensor, group: Tensor) -> Tensor:
        """[N] bool: responses of this round to keep. Raises: DataError if the last round leaves the batch unfilled."""
        keep = informative_groups(accuracy, group)
        self.rounds += 1
        self.seen += torch.unique(group).numel()
        self.usable += torch.unique(group[keep]).numel()
        if not self.full and self.rounds >= self.max_rounds:
            raise DataError(
                f"dynamic sampling: {self.usable} of {self.prompts} prompts usable after {self.rounds} rounds\n"
                "the task is too easy or too hard for the model; change it, raise max_rounds, or switch the filter off"
            )
        return keep


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Added to the reward: 0 up to max_length - buffer, then falling linearly to -factor at max_length.

    lengths [N] int. Returns [N] fp32. Raises: ConfigError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"overlong shaping: buffer={buffer} must lie in (0, max_length={max_length}]")
    over = lengths.float() - (max_length - buffer)
    return torch.clamp(-over / buffer * factor, max=0.0)


def overlong_mask(mask: Tensor, truncated: Tensor, segment_ids: Tensor | None = None) -> Tensor:
    """The loss mask without responses that were cut by length; they stay in their group's baseline.

    mask [N, T] with truncated [N], or packed with segment_ids.
    """
    if segment_ids is None:
        return mask.bool() & ~truncated.bool()[:, None]
    return mask.bool() & ~truncated.bool()[segment_ids.clamp(min=0).long()]
