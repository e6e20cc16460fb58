"""Dr.GRPO: no division by the group's standard deviation, none by the response's length.

    J = (1/M) sum_i (1/L_max) sum_t min(r A, clip(r, 1 - low, 1 + high) A),   A_i = R_i - mean_group R

L_max (`loss_max_length`) is a constant, the generation budget. Source: arXiv 2503.20783.
"""

from tracekit.objectives.losses.ppo import PPO


class DrGRPO(PPO):
    """GRPO without its two normalisations."""

    name = "dr_grpo"
    advantage = "dr_grpo"
    aggregation = "seq-mean-token-sum-norm"
