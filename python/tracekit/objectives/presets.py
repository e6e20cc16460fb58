"""Presets people know from verl's rollout correction, as arguments of `policy_loss`.

`policy_loss("grpo", correction="verl:decoupled_geo_rs")`. Bypass presets that use REINFORCE fix the policy loss too.
Source: `verl/trainer/config/algorithm.py` (names and numbers).
"""

from typing import Any

from tracekit.errors import ConfigError
from tracekit.objectives.registry import nearest

_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_BYPASS = {"bypass": True}
_PG = {"name": "reinforce", "ratio_level": "none"}
_PG_TOKEN = {"name": "reinforce", "ratio_level": "token", "ratio_cap": 2.0}
_PG_SEQUENCE = {"name": "reinforce", "ratio_level": "sequence", "ratio_cap": 2.0}

VERL_PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "decoupled_seq_is_rs": {**_SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE, **_GEO},
    "decoupled_geo_rs_token_tis": {**_TOKEN, **_GEO},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE, **_K3},
    "decoupled_k3_rs_token_tis": {**_TOKEN, **_K3},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, **_K3},
    "bypass_pg_is": _PG_SEQUENCE,
    "bypass_pg_geo_rs": {**_PG, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_PG_SEQUENCE, **_GEO},
    "bypass_pg_geo_rs_token_tis": {**_PG_TOKEN, **_GEO},
}
"""verl's names. `bypass_pg_token_icepop` is left out: its weight is zero outside a band of exp(logp - logp_mu), which
`policy_loss("reinforce", correction="token_rejection", ratio_cap=5.0, reject_low=0.5, reject_high=5.0)` spells out."""


def expand_preset(name: str, correction: str, knobs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Correction and knobs of `verl:<preset>`; given knobs win over the preset's. Others pass unchanged.

    Raises: ConfigError for an unknown preset, or one of another policy loss.
    """
    if not correction.startswith("verl:"):
        return correction, knobs
    preset = correction.removeprefix("verl:")
    if preset not in VERL_PRESETS:
        raise ConfigError(
            f"unknown preset {correction!r}{nearest(preset, VERL_PRESETS)}\nknown: {', '.join(VERL_PRESETS)}"
        )
    values = dict(VERL_PRESETS[preset])
    needed = values.pop("name", name)
    if needed != name:
        raise ConfigError(f"preset {correction!r} is one of policy loss {needed!r}; set algo.name={needed!r}")
    return "verl", {**values, **knobs}
