"""What a mismatch correction is: a detached weight and a keep-mask for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from tracekit.objectives.metrics import Metrics
from tracekit.objectives.state import ObjectiveState
from tracekit.objectives.terms import Terms

if TYPE_CHECKING:
    from tracekit.objectives.losses.base import PolicyLoss


@dataclass(slots=True)
class Weights:
    """Result of a correction. All [T], detached (except `centre`)."""

    weight: Tensor
    """u, multiplies the token loss."""
    keep: Tensor | None = None
    """Bool: tokens that stay in the loss; None keeps all."""
    raw: Tensor | None = None
    """The ratio before any cap, for metrics; None if the correction has none."""
    capped: Tensor | None = None
    """Bool: tokens whose weight the cap changed."""
    high_scale: Tensor | None = None
    """Multiplies the surrogate's upper clip bound (QuRL)."""
    centre: Tensor | None = None
    """Added to the token loss, with graph (Score Centering)."""
    topk_slope: Tensor | None = None
    """[T, K] detached d ell / d logp_topk (Score Centering)."""
    extra: dict[str, Tensor] | None = None
    """Values the correction's own metrics need."""


class Correction:
    """Base of the corrections. A subclass states its formula, source and knobs."""

    name: ClassVar[str]
    level: Literal["token", "sequence"] = "token"
    """"sequence": one unusable logp_mu drops the whole response."""
    needs_old: bool = True
    """Uses rho = exp(logp_old - logp_mu), so it makes no sense in bypass mode."""
    needs_clip: ClassVar[bool] = False
    """Only defined for a surrogate with an upper clip bound."""
    only_losses: ClassVar[tuple[str, ...]] = ()
    """If not empty: the surrogates it is defined on."""
    rejects: ClassVar[bool] = False
    """Has a keep-mask on rho (on the current policy in bypass mode and for two-policy losses)."""
    drops_by_logp: ClassVar[bool] = False
    """Its keep-mask depends on the current policy."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the step."""
    needs_topk: int = 0
    """Number of the sampler's top log-probs it reads."""
    Knobs: ClassVar[type]
    """Dataclass of the method's parameters."""

    def __init__(self, knobs: Any):
        self.knobs = knobs

    def check(self) -> str | None:
        """What is wrong with the knobs, in one line; None if nothing."""
        return None

    def bind(self, loss: PolicyLoss) -> None:
        """Called once with the surrogate it is combined with."""

    def prepare_state(self, state: ObjectiveState) -> None:
        """Called once with the objective's fresh state (a given X goes into it)."""

    def weight_totals(self, t: Terms, w: Weights) -> tuple[Tensor, Tensor]:
        """Sum and number of the weights that batch normalisation averages (tokens here)."""
        return torch.where(t.valid, w.weight, 0.0).sum().double(), t.valid.sum().double()

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        raise NotImplementedError

    def record(self, m: Metrics, t: Terms, w: Weights, state: ObjectiveState) -> None:
        """Metrics of this correction alone."""


@dataclass(kw_only=True, slots=True)
class NoKnobs:
    """No parameters."""


class NoCorrection(Correction):
    """Weight 1: the surrogate as it is."""

    name = "none"
    needs_old = False
    Knobs = NoKnobs

    def __call__(self, t: Terms, state: ObjectiveState) -> Weights:
        return Weights(weight=torch.ones_like(t.old))
