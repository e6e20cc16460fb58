"""Refuse an objective that cannot mean what it says, before anything is built or sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracekit.errors import ConfigError
from tracekit.objectives.advantages import GROUP_ESTIMATORS
from tracekit.objectives.corrections.base import Correction
from tracekit.objectives.losses.base import PolicyLoss
from tracekit.objectives.presets import expand_preset
from tracekit.objectives.registry import CommonKnobs, correction_class, knob_names, loss_class, nearest


def split_knobs(name: str, correction: str, knobs: Mapping[str, Any]) -> tuple[PolicyLoss, Correction, CommonKnobs]:
    """Give each knob to the part that owns it and build the parts.

    Raises: ConfigError for unknown names or knobs (naming the nearest valid one) and for values out of range.
    """
    loss_type, correction_type = loss_class(name), correction_class(correction)
    owners = (loss_type.Knobs, correction_type.Knobs, CommonKnobs)
    known = [knob for owner in owners for knob in knob_names(owner)]
    for knob in knobs:
        if knob not in known:
            raise ConfigError(
                f"algo: {name!r} with correction {correction!r} has no knob {knob!r}{nearest(knob, known)}\n"
                f"its knobs: {', '.join(known)}"
            )
    parts = []
    for owner in owners:
        mine = {k: v for k, v in knobs.items() if k in knob_names(owner)}
        try:
            parts.append(owner(**mine))
        except TypeError as e:
            raise ConfigError(f"algo: {e}") from None
    loss, corr, common = loss_type(parts[0]), correction_type(parts[1]), parts[2]
    for what, part in ((f"algo {name!r}", loss), (f"correction {correction!r}", corr), ("algo", common)):
        try:
            problem = part.check()
        except TypeError:
            problem = f"a knob has the wrong type: {dict(knobs)}"
        if problem:
            raise ConfigError(f"{what}: {problem}")
    _check_combination(loss, corr, common)
    return loss, corr, common


def _check_combination(loss: PolicyLoss, corr: Correction, common: CommonKnobs) -> None:
    pair = f"algo {loss.name!r} with correction {corr.name!r}"
    if loss.owns_mismatch and corr.name != "none" and corr.name not in loss.accepts_corrections:
        raise ConfigError(
            f"{pair}: {loss.name} weighs the sampler's mismatch itself, so this would correct twice\n"
            f"use correction none{''.join(f' or {c}' for c in loss.accepts_corrections)}"
        )
    if corr.only_losses and loss.name not in corr.only_losses:
        raise ConfigError(f"{pair}: {corr.name} is defined on {' or '.join(corr.only_losses)} only")
    if corr.needs_clip and not loss.clips_ratio:
        raise ConfigError(f"{pair}: {corr.name} moves the upper clip bound, and {loss.name} has none")
    if common.bypass and not loss.allows_bypass:
        raise ConfigError(f"{pair}: bypass=true has no meaning for {loss.name}; leave it out")
    if corr.needs_old and (common.bypass or not loss.uses_old):
        raise ConfigError(
            f"{pair}: without logp_old (bypass, or a two-policy loss) rho is 1 and {corr.name} would do nothing\n"
            "use a three-policy loss with bypass=false, or correction none"
        )
    mode = common.loss_agg_mode or loss.aggregation
    if mode == "seq-mean-token-sum-norm" and common.loss_max_length is None:
        raise ConfigError(
            f"algo {loss.name!r}: loss_agg_mode seq-mean-token-sum-norm needs loss_max_length\n"
            "set it to the generation budget (the longest response the sampler may produce)"
        )
    advantage = common.advantage or loss.advantage
    if loss.level == "sequence" and advantage == "gae":
        raise ConfigError(
            f"algo {loss.name!r}: a response-level ratio needs one advantage a response, gae gives one a token"
        )
    if common.positive_only and common.denominator == "surviving":
        raise ConfigError("algo: positive_only with denominator=surviving would re-weight; use denominator=original")


def validate(name: str, correction: str, knobs: Mapping[str, Any], rollout_config: Any = None) -> None:
    """Check an objective together with how responses are sampled.

    rollout_config: mapping or object; of `top_p`, `top_k`, `group_size`, `keep_sampling_mask`, `topk_logprobs`,
    `max_tokens` (or `max_response_len`) those that it has are read.
    Raises: ConfigError, saying what to change.
    """
    correction, knobs = expand_preset(name, correction, dict(knobs))
    loss, corr, common = split_knobs(name, correction, knobs)
    corr.bind(loss)
    if rollout_config is None:
        return

    def read(key: str, default: Any) -> Any:
        if isinstance(rollout_config, Mapping):
            return rollout_config.get(key, default)
        return getattr(rollout_config, key, default)

    top_p, top_k = read("top_p", 1.0), read("top_k", 0)
    cut = [f"top_p={top_p}"] * (top_p < 1.0) + [f"top_k={top_k}"] * (top_k is not None and top_k > 0)
    if cut and not read("keep_sampling_mask", False):
        raise ConfigError(
            f"rollout: {' and '.join(cut)} renormalises the sampler's distribution, which looks like mismatch\n"
            "sample with top_p=1 and top_k off, or return and replay the keep-mask (keep_sampling_mask=true)"
        )
    group_size = read("group_size", None)
    advantage = common.advantage or loss.advantage
    if group_size is not None and group_size < 2 and advantage in GROUP_ESTIMATORS:
        raise ConfigError(
            f"rollout.group_size={group_size}: {advantage} advantages compare the responses to a prompt\n"
            "use at least 2, or algo.advantage reinforce_pp or gae"
        )
    have = read("topk_logprobs", None)
    if have is not None and corr.needs_topk > have:
        raise ConfigError(
            f"correction {corr.name!r} reads the sampler's top {corr.needs_topk} log-probs, it returns {have}\n"
            f"set rollout.topk_logprobs={corr.needs_topk}"
        )
    longest = read("max_tokens", read("max_response_len", None))
    if longest is not None and common.loss_max_length is not None and common.loss_max_length < longest:
        raise ConfigError(
            f"algo.loss_max_length={common.loss_max_length} is below the longest response, {longest}\n"
            "set both to the generation budget"
        )
