"""Advantages from rewards: one number a response, on the whole batch of responses.

Sources: GRPO, arXiv 2402.03300 section 4.1.2 (it does not say which standard deviation; verl divides by the Bessel one,
torchtitan by the population one); Dr.GRPO, 2503.20783 (`std="none"`); RLOO, 2402.14740; REINFORCE++, 2501.03262.
"""

from typing import Literal

import torch
from torch import Tensor

from tracekit.errors import ConfigError

EPS = 1e-6
"""Added to a group's standard deviation."""


class _Groups:
    def __init__(self, rewards: Tensor, group: Tensor):
        if rewards.shape != group.shape or rewards.dim() != 1:
            raise ConfigError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be [N]")
        self.r = rewards if rewards.dtype == torch.float64 else rewards.float()
        _, self.index, self.size = torch.unique(group, return_inverse=True, return_counts=True)

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.size.numel()).index_add(0, self.index, x)

    def spread(self, y: Tensor) -> Tensor:
        return y[self.index]

    def constant(self) -> Tensor:
        """[N] bool: every reward of the response's group is the same number."""
        low = self.r.new_full((self.size.numel(),), torch.inf).scatter_reduce(0, self.index, self.r, "amin")
        high = self.r.new_full((self.size.numel(),), -torch.inf).scatter_reduce(0, self.index, self.r, "amax")
        return self.spread(low == high)

    def refuse_singletons(self, method: str) -> None:
        if self.size.numel() and int(self.size.min()) < 2:
            raise ConfigError(
                f"{method}: a prompt has a single response, so its advantage has no baseline\n"
                "sample at least two responses a prompt, or drop groups that lost all but one"
            )

    def centred(self) -> Tensor:
        mean = self.spread(self.sum(self.r) / self.size)
        # Equal rewards give exactly 0, not the rounding of their mean.
        return torch.where(self.constant(), 0.0, self.r - mean)


def group_advantages(
    rewards: Tensor, group: Tensor, std: Literal["none", "bessel", "population"] = "bessel", eps: float = EPS
) -> Tensor:
    """(R - mean_group R) / (std_group R + eps), or the numerator alone with `std="none"` (Dr.GRPO).

    rewards [N] float, group [N] int → [N] (fp32, or fp64 for fp64 rewards). A group of equal rewards gets exactly 0.
    Raises: ConfigError for a group of one, or an unknown `std`.
    """
    g = _Groups(rewards, group)
    g.refuse_singletons("group advantages")
    centred = g.centred()
    if std == "none":
        return centred
    if std not in ("bessel", "population"):
        raise ConfigError(f"std={std!r} is none of none, bessel, population")
    ddof = 1 if std == "bessel" else 0
    spread = torch.sqrt(g.sum(centred * centred) / (g.size - ddof))
    return centred / (g.spread(spread) + eps)


def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """REINFORCE leave-one-out: R_i minus the mean of its siblings, = (R_i - mean) G / (G - 1). Shapes as above."""
    g = _Groups(rewards, group)
    g.refuse_singletons("RLOO")
    size = g.spread(g.size.to(g.r.dtype))
    return g.centred() * size / (size - 1)


def reinforce_pp_advantages(
    rewards: Tensor, group: Tensor | None = None, *, baseline: Literal["none", "group"] = "group", eps: float = 1e-8
) -> Tensor:
    """REINFORCE++: rewards normalised over the whole batch; `baseline="group"` first subtracts the group mean.

    rewards [N] must be those of the global batch (the normalisation is global). Returns [N].
    """
    if baseline == "group":
        g = _Groups(rewards, group if group is not None else torch.zeros_like(rewards, dtype=torch.long))
        g.refuse_singletons("REINFORCE++ with a group baseline")
        r = g.centred()
    else:
        r = rewards if rewards.dtype == torch.float64 else rewards.float()
    if r.numel() < 2:
        return torch.zeros_like(r)
    centred = r - r.mean()
    return centred / torch.sqrt((centred * centred).mean() + eps)


def compute_advantages(kind: str, rewards: Tensor, group: Tensor, *, std: str = "bessel") -> Tensor:
    """[N] advantages by the name in `Objective.advantage`: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline.

    `std` only matters for grpo. "gae" needs a critic: see `gae.py`.
    Raises: ConfigError for any other name.
    """
    if kind == "grpo":
        return group_advantages(rewards, group, std)
    if kind == "dr_grpo":
        return group_advantages(rewards, group, "none")
    if kind == "rloo":
        return rloo_advantages(rewards, group)
    if kind == "reinforce_pp":
        return reinforce_pp_advantages(rewards, baseline="none")
    if kind == "reinforce_pp_baseline":
        return reinforce_pp_advantages(rewards, group)
    raise ConfigError(f"advantage {kind!r} is not a critic-free estimator: {', '.join(CRITIC_FREE)}")


CRITIC_FREE = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Estimators of `compute_advantages`."""
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Those that need at least two responses a prompt."""
