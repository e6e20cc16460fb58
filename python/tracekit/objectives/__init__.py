"""Objectives: advantages, policy losses, corrections of the train-rollout mismatch, and their metrics.

objective = policy_loss("grpo", correction="tis", is_cap=5.0)
out = objective(LossBatch(logp=…, logp_old=…, logp_mu=…, advantages=…, mask=…))
out.loss.backward()
"""

from tracekit.objectives.advantages import compute_advantages, group_advantages
from tracekit.objectives.batch import LossBatch, LossOutput, StepTotals
from tracekit.objectives.factory import from_config, policy_loss, unused_keys
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.objective import Objective, with_totals
from tracekit.objectives.registry import CORRECTIONS, LOSSES
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.validate import validate

__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "LossBatch",
    "LossOutput",
    "Metrics",
    "Objective",
    "ObjectiveState",
    "StepTotals",
    "compute_advantages",
    "from_config",
    "group_advantages",
    "policy_loss",
    "unused_keys",
    "validate",
    "with_totals",
]
