"""Make an objective from names and knobs, or from the `[algo]` table of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from tracekit.errors import ConfigError
from tracekit.objectives.objective import Objective
from tracekit.objectives.presets import expand_preset
from tracekit.objectives.registry import (
    CORRECTIONS,
    LOSSES,
    CommonKnobs,
    correction_class,
    knob_names,
    loss_class,
    nearest,
)
from tracekit.objectives.validate import split_knobs, validate


def policy_loss(name: str, *, correction: str = "none", **knobs: Any) -> Objective:
    """Objective of policy loss `name` with one correction.

    Knobs are those of the loss, of the correction and of `CommonKnobs`; docs/concepts has a page a method.
    Raises: ConfigError for unknown names or knobs (the nearest valid one is named), bad values and combinations that
    contradict each other.
    """
    correction, knobs = expand_preset(name, correction, knobs)
    return Objective(*split_knobs(name, correction, knobs))


def config_knobs(algo: Any, rollout_config: Mapping[str, Any] | Any = None) -> dict[str, Any]:
    """Knobs of an `[algo]` table for its method. Later ones win: `algo.methods`, the typed fields, `algo.knobs`.

    A table of `algo.methods` is for the policy loss or correction whose name it bears, so that a configuration can be
    run with another method and takes that one's own defaults. A typed field belongs to several methods, so one that
    the method does not know is left out, and None is the method's own default; a name in `algo.knobs` was written on
    purpose and stays, to be refused if nobody knows it. `loss_max_length` defaults to the rollout's
    `max_response_len` where the aggregation divides by it.

    Raises: ConfigError for a table of no method, or a knob in it that the method does not have.
    """
    kind = algo.correction.partition(":")[0]
    loss, common = loss_class(algo.name), knob_names(CommonKnobs)
    known = {*knob_names(loss.Knobs), *knob_names(correction_class(kind).Knobs), *common}
    typed = {f.name: getattr(algo, f.name) for f in fields(algo) if f.name in known}
    typed = {k: v for k, v in typed.items() if v is not None}
    tables = getattr(algo, "methods", {})
    for method, table in tables.items():
        _check_table(method, table)
    knobs = {**tables.get(algo.name, {}), **tables.get(kind, {}), **typed, **algo.knobs}
    mode = knobs.get("loss_agg_mode") or loss.aggregation
    longest = _read(rollout_config, "max_response_len")
    if mode == "seq-mean-token-sum-norm" and longest is not None:
        knobs.setdefault("loss_max_length", longest)
    return knobs


_OF_CRITIC = ("critic", "critic_lr", "vf_coef", "value_clip", "gae_gamma", "gae_lambda")


def unused_keys(algo: Any, keys: Iterable[str]) -> list[str]:
    """Those of `keys` (names of fields of the `[algo]` table that somebody set) which its method does not read.

    Not an error: one configuration may serve several methods. Silence would be worse, since a bound that is not there
    looks like one that never binds.
    """
    loss, correction = loss_class(algo.name), correction_class(algo.correction.partition(":")[0])
    own = {*knob_names(loss.Knobs), *knob_names(correction.Knobs), *knob_names(CommonKnobs)}
    owners = [loss_class(n).Knobs for n in LOSSES] + [correction_class(n).Knobs for n in CORRECTIONS]
    unread = {knob for owner in owners for knob in knob_names(owner)} - own
    advantage = algo.advantage or loss.advantage
    if advantage != "gae":
        unread.update(_OF_CRITIC)
    if advantage != "grpo":
        unread.add("adv_std")
    return [key for key in keys if key in unread]


def _check_table(method: str, table: Mapping[str, Any]) -> None:
    if method not in LOSSES and method not in CORRECTIONS:
        close = nearest(method, (*LOSSES, *CORRECTIONS))
        raise ConfigError(f"algo.methods.{method}: no surrogate or correction has that name{close}")
    if not isinstance(table, Mapping):
        raise ConfigError(f"algo.methods.{method} = {table!r}: expected a table of the method's knobs")
    owner = loss_class(method) if method in LOSSES else correction_class(method)
    known = (*knob_names(owner.Knobs), *knob_names(CommonKnobs))
    for knob in table:
        if knob not in known:
            raise ConfigError(
                f"algo.methods.{method}.{knob}: {method!r} has no such knob{nearest(knob, known)}\n"
                f"its knobs: {', '.join(known)}"
            )


def _read(source: Mapping[str, Any] | Any, key: str) -> Any:
    return source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)


def from_config(algo: Any, rollout_config: Mapping[str, Any] | Any = None) -> Objective:
    """Objective of an `[algo]` table (dataclass with `name`, `correction`, `knobs` and typed knobs), validated.

    Raises: ConfigError, as `policy_loss` and `validate`.
    """
    knobs = config_knobs(algo, rollout_config)
    validate(algo.name, algo.correction, knobs, rollout_config)
    return policy_loss(algo.name, correction=algo.correction, **knobs)
