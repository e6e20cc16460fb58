"""The [algo] table: methods' own defaults, tables of one method, rules between keys."""

import pytest

from tracekit import config as tk
from tracekit.errors import ConfigError
from tracekit.objectives import LOSSES, from_config, policy_loss


def objective(paths=(), **overrides):
    c = tk.load(paths, {key.replace("__", "."): value for key, value in overrides.items()})
    tk.validate(c)
    return from_config(c.algo, c.rollout)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("paths", [(), (tk.quickstart(),)])
def test_a_name_alone_means_the_method_as_published(name, paths):
    found = objective(paths, algo__name=name, algo__correction="none")
    length = 8 if not paths else tk.load(paths).rollout.max_response_len
    own = policy_loss(name, **(dict(loss_max_length=length) if name == "dr_grpo" else {}))
    if name == "grpo" and paths:
        assert found.loss.knobs.clip_ratio_high == 0.28
    else:
        assert found.loss.knobs == own.loss.knobs
    assert found.common == own.common or name == "grpo"
    assert found.agg_mode == own.agg_mode


def test_acrl_keeps_its_own_cap_on_the_quickstart():
    assert objective([tk.quickstart()], algo__correction="acrl").correction.knobs.is_cap == 3.0
    assert objective([tk.quickstart()]).correction.knobs.is_cap == 5.0


def test_typed_keys_win_over_a_methods_table_and_knobs_over_both():
    paths = [tk.quickstart()]
    assert objective(paths, algo__clip_ratio_high=0.4).loss.knobs.clip_ratio_high == 0.4
    both = {"algo.clip_ratio_high": 0.4, "algo.knobs.clip_ratio_high": 0.5}
    c = tk.load(paths, both)
    assert from_config(c.algo, c.rollout).loss.knobs.clip_ratio_high == 0.5
    assert (
        from_config(tk.load(paths, ["--algo.methods.grpo.clip_ratio_low", "0.1"]).algo).loss.knobs.clip_ratio_low == 0.1
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"])
def test_every_aggregation_is_allowed(mode):
    found = objective(algo__loss_agg_mode=mode, rollout__max_response_len=6)
    assert found.agg_mode == mode
    assert found.common.loss_max_length == (6 if mode.endswith("norm") else None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algo.methods": {"grop": {"is_cap": 1.0}}}, "did you mean 'grpo'"),
        ({"algo.methods": {"grpo": {"clip_ratio_hihg": 1.0}}}, "did you mean 'clip_ratio_high'"),
        ({"algo.methods": {"tis": 3}}, "expected a table"),
        ({"algo.name": "tbpo"}, "correct twice"),
        ({"algo.correction": "tis,mis"}, "expected one of"),
        ({"algo.correction": "verl:nothing"}, "unknown preset"),
        ({"algo.overlong_buffer": 99}, "rollout.max_response_len"),
        ({"algo.x_baseline_prompts": 10**6}, "task.eval_size"),
        ({"algo.kl_reward_coef": 0.1}, "only gae"),
        ({"algo.critic_lr": 0.0}, "greater than 0"),
        ({"algo.clip_ratio_low": 1.5}, "0 to 1"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(ConfigError, match=message):
        c = tk.load([], overrides)
        tk.validate(c)
        from_config(c.algo, c.rollout)


def test_presets_pass_the_configurations_check():
    assert objective(algo__correction="verl:decoupled_geo_rs").correction.name == "verl"
