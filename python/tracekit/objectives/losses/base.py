"""What a policy loss is: one token loss with a graph and, beside it, its derivative in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from tracekit.objectives.corrections.base import Weights
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import Terms


@dataclass(slots=True)
class Surrogate:
    """A policy loss before correction weight and aggregation. All [T]."""

    ell: Tensor
    """Token loss, with graph (direct form)."""
    slope: Tensor
    """Detached d ell / d logp of the same token (coefficient form)."""
    keep: Tensor | None = None
    """Bool: tokens this surrogate leaves in; None keeps all. Dropped tokens stay in the denominators."""
    clipped_low: Tensor | None = None
    """Bool: no gradient because the ratio fell too far (A < 0)."""
    clipped_high: Tensor | None = None
    """Bool: no gradient because the ratio rose too far (A > 0)."""
    clipped_dual: Tensor | None = None
    """Bool: no gradient because of the dual clip (A < 0, ratio far up)."""
    ratio: Tensor | None = None
    """The detached ratio the surrogate clips, if it is not exp(logp - logp_old) of the token."""
    lines: tuple[float, ...] = ()
    """Clip lines, drawn in the ratio histogram."""


class PolicyLoss:
    """Base of the policy losses. A subclass states its formula, source and knobs."""

    name: ClassVar[str]
    level: Literal["token", "sequence"] = "token"
    """"sequence": the ratio is one of the whole response (two passes under chunked logits)."""
    advantage: ClassVar[str] = "grpo"
    """Estimator the method was published with (see `advantages.py`)."""
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    """Default `loss_agg_mode`."""
    clips_ratio: ClassVar[bool] = False
    """PPO-type clip with an upper bound that a correction may move."""
    allows_bypass: ClassVar[bool] = False
    """May run with logp_mu in place of logp_old."""
    owns_mismatch: ClassVar[bool] = False
    """Weighs the sampler's mismatch itself, so no correction may be added."""
    accepts_corrections: ClassVar[tuple[str, ...]] = ()
    """With `owns_mismatch`: corrections that are nevertheless defined on it."""
    uses_old: ClassVar[bool] = True
    """Reads logp_old (a two-policy method does not)."""
    drops_by_logp: ClassVar[bool] = False
    """`keep` depends on the current policy."""
    Knobs: ClassVar[type]
    """Dataclass of the method's parameters."""

    def __init__(self, knobs: Any):
        self.knobs = knobs

    def check(self) -> str | None:
        """What is wrong with the knobs, in one line; None if nothing."""
        return None

    def __call__(self, t: Terms, w: Weights) -> Surrogate:
        raise NotImplementedError

    def record(self, m: Metrics, t: Terms, s: Surrogate) -> None:
        """Metrics of this method alone."""

    def advice(self, m: Metrics, mini_step: int) -> str | None:
        """A warning a person should read after this mini-step (0 is the first); None if all is well."""
        return None
