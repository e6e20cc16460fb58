"""DAPO's policy loss: clip-higher and a mean over all tokens of the batch.

    J = (1/sum_i L_i) sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A),   low .2, high .28

Source: arXiv 2503.14476. Its dynamic sampling and overlong shaping are in `filters.py`.
"""

from dataclasses import dataclass

from tracekit.objectives.losses.ppo import PPO, ClipKnobs


@dataclass(kw_only=True, slots=True)
class DAPOKnobs(ClipKnobs):
    """Bounds of the ratio, the upper one further away."""

    clip_ratio_high: float = 0.28
    """Upper bound is 1 plus this."""


class DAPO(PPO):
    """Clip-higher, token-mean."""

    name = "dapo"
    advantage = "grpo"
    aggregation = "token-mean"
    Knobs = DAPOKnobs
