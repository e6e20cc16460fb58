"""Names of the policy losses and corrections, and where their classes are."""

import difflib
from dataclasses import dataclass, fields
from importlib import import_module

from tracekit.errors import ConfigError
from tracekit.objectives.aggregate import AGG_MODES
from tracekit.objectives.penalties import KL_ESTIMATORS

_LOSSES = {
    "ppo": ("ppo", "PPO"),
    "grpo": ("grpo", "GRPO"),
    "dr_grpo": ("dr_grpo", "DrGRPO"),
    "dapo": ("dapo", "DAPO"),
    "gspo": ("gspo", "GSPO"),
    "cispo": ("cispo", "CISPO"),
    "tbpo": ("tbpo", "TBPO"),
    "reinforce": ("reinforce", "Reinforce"),
    "minirl": ("minirl", "MiniRL"),
    "dppo_tv": ("dppo_tv", "DPPOTV"),
}
_CORRECTIONS = {
    "none": ("base", "NoCorrection"),
    "tis": ("tis", "TIS"),
    "mis": ("mis", "MIS"),
    "icepop": ("icepop", "IcePop"),
    "token_rejection": ("rejection", "TokenRejection"),
    "sequence_rejection": ("rejection", "SequenceRejection"),
    "acrl": ("acrl", "ACRL"),
    "qurl": ("qurl", "QuRL"),
    "score_centering": ("score_centering", "ScoreCentering"),
    "opsm": ("opsm", "OPSM"),
    "verl": ("verl", "Verl"),
}
LOSSES = tuple(_LOSSES)
"""Names `policy_loss` takes."""
CORRECTIONS = tuple(_CORRECTIONS)
"""Names `correction` takes."""


@dataclass(kw_only=True, slots=True)
class CommonKnobs:
    """Parameters of every objective."""

    loss_agg_mode: str | None = None
    """One of `aggregate.AGG_MODES` (token-mean, seq-mean-token-mean, …); None is the method's own."""
    loss_max_length: int | None = None
    """Constant length that seq-mean-token-sum-norm divides by: the generation budget, never a batch's length."""
    denominator: str = "original"
    """`original`: rejected tokens stay in the denominators. `surviving`: they do not."""
    bypass: bool = False
    """Two policies: logp_mu takes the place of logp_old, the clip acts on exp(logp - logp_mu)."""
    advantage: str | None = None
    """Estimator of the advantages; None is the one the method was published with."""
    positive_only: bool = False
    """Leave tokens with a negative advantage out of the loss."""
    kl_coef: float = 0.0
    """Weight of the KL term to logp_ref."""
    kl_estimator: str = "k3"
    """k1, k2 or k3."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    nonfinite: str = "count"
    """Non-finite learner log-probs: `count` leaves the token out and counts it, `raise` stops the run."""
    metric_level: str = "full"
    """`basic` leaves out histograms, position buckets and version splits."""

    def check(self) -> str | None:
        """What is wrong, in one line; None if nothing."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(str(v) for v in allowed if v is not None)
                return f"{name}={value!r} is none of {known}{nearest(str(value), allowed)}"
        if self.kl_coef < 0:
            return f"kl_coef={self.kl_coef} must not be negative"
        if self.loss_max_length is not None and self.loss_max_length < 1:
            return f"loss_max_length={self.loss_max_length} must be at least 1"
        return None


_CHOICES = {
    "loss_agg_mode": (None, *AGG_MODES),
    "denominator": ("original", "surviving"),
    "advantage": (None, "gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    "kl_estimator": KL_ESTIMATORS,
    "nonfinite": ("count", "raise"),
    "metric_level": ("basic", "full"),
}


def nearest(name: str, known) -> str:
    """`; did you mean X?` if some known name is close, else an empty string."""
    match = difflib.get_close_matches(name, [k for k in known if k is not None], n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def loss_class(name: str) -> type:
    """The policy loss of that name. Raises: ConfigError."""
    return _find("policy loss", name, _LOSSES, "losses")


def correction_class(name: str) -> type:
    """The correction of that name. Raises: ConfigError."""
    if any(sep in name for sep in ",+ "):
        raise ConfigError(
            f"correction {name!r}: exactly one correction at a time; pick one of {', '.join(CORRECTIONS)}"
        )
    return _find("correction", name, _CORRECTIONS, "corrections")


def _find(what: str, name: str, table: dict[str, tuple[str, str]], folder: str) -> type:
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}{nearest(name, table)}\nknown: {', '.join(table)}")
    module, attribute = table[name]
    return getattr(import_module(f"tracekit.objectives.{folder}.{module}"), attribute)


def knob_names(cls: type) -> tuple[str, ...]:
    """Fields of a knobs dataclass."""
    return tuple(f.name for f in fields(cls))
