"""GRPO: PPO's clipped surrogate on group-normalised rewards, mean over tokens within a response, then over responses.

    J = (1/M) sum_i (1/L_i) sum_t min(r A, clip(r, 1 - low, 1 + high) A)

Source: DeepSeekMath, arXiv 2402.03300 eq. 3 (its KL term is `kl_coef`, 0 here). With `correction="tis", is_cap=5` this
is the loss TRACE trains with (2610.07767, section 4).
"""

from tracekit.objectives.losses.ppo import PPO


class GRPO(PPO):
    """Clipped surrogate, one critic-free advantage a response."""

    name = "grpo"
    advantage = "grpo"
    aggregation = "seq-mean-token-mean"
