import pytest

from tracekit import config as tk
from tracekit.config.plan import BLOCK, TOKEN_SCALED
from tracekit.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rollout.group_size": 1}, "rollout.group_size = 1: must be at least 2"),
        ({"model.top_k": 9}, "model.top_k = 9 is more than model.n_experts = 8"),
        ({"model.n_heads": 4, "model.n_kv_heads": 3}, "not a multiple of model.n_kv_heads = 3"),
        ({"guidance.bits": 5}, "guidance.bits = 5: must be 0 to 4"),
        ({"guidance.bits": -1}, "guidance.bits = -1: must be 0 to 4"),
        ({"guidance.layers": "first:2"}, "expected all, last_half or last:N"),
        ({"guidance.layers": "last:0"}, "N must be 1 to"),
        ({"guidance.layers": "last:99"}, "N must be 1 to"),
        ({"guidance.sites": []}, "guidance.sites is empty"),
        ({"guidance.sites": ["k", "k"]}, "each site once"),
        ({"quant.experts": "int8"}, "int8 experts leave no record; take moe_input out, or set guidance.bits to 0"),
        (
            {"quant.forward": "hardware"},
            "multiplies eight-bit codes, not nvfp4-exact; set quant.experts to fp8",
        ),
        ({"rollout.kv_pool": "packed"}, "rollout.kv_pool is of SGLang's cache"),
        (
            {"rollout.kv_pool": "packed", "rollout.engine": "sglang", "quant.kv": "mxfp4-rceil"},
            "holds quant.kv = \"nvfp4-exact\", not 'mxfp4-rceil'",
        ),
        (
            {"quant.experts": "int8", "guidance.bits": 0, "rollout.engine": "sglang"},
            "the SGLang plugin rounds to four bits",
        ),
        ({"rollout.temperature": 0.0}, "rollout.temperature = 0.0: must be greater than 0"),
        ({"rollout.max_response_len": 128, "model.max_seq_len": 128}, "leaves no room for a prompt"),
        ({"optim.microbatch_tokens": 16}, "one row must fit"),
        ({"model.head_dim": 17, "quant.kv": "none"}, "must be even"),
        ({"algo.mini_steps": 9, "rollout.prompts_per_step": 8}, "algo.mini_steps = 9 is more than rollout.prompts_"),
        ({"name": "../elsewhere"}, "name = '../elsewhere'"),
        ({"algo.name": "grop"}, "algo.name = 'grop': expected one of "),
        ({"algo.correction": "tsi"}, "algo.correction = 'tsi': expected one of none, "),
        ({"name": ""}, "a run's name is letters"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_a_broken_rule_is_a_one_line_error(overrides, message):
    with pytest.raises(ConfigError) as error:
        tk.validate(tk.load([], overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "module", "dimension", "block", "remedy"),
    [
        ({"model.dim": 72}, "routed experts (input)", "model.dim = 72", 16, "set model.dim to 64 or 80"),
        ({"model.moe_hidden": 40}, "routed experts (hidden)", "model.moe_hidden = 40", 16, "to 32 or 48"),
        ({"model.head_dim": 8}, "attention K and V", "model.head_dim = 8", 16, "set model.head_dim to 16"),
        (
            {"model.head_dim": 48, "quant.kv": "mxfp4-rceil"},
            "attention K and V",
            "model.head_dim = 48",
            32,
            'or quant.kv to "none"',
        ),
        (
            {"model.moe_hidden": 48, "quant.experts": "mxfp4-rceil"},
            "routed experts (hidden)",
            "model.moe_hidden = 48",
            32,
            "or quant.experts to",
        ),
    ],
)
def test_a_block_that_does_not_divide_names_module_dimension_block_and_remedy(
    overrides, module, dimension, block, remedy
):
    with pytest.raises(ConfigError) as error:
        tk.validate(tk.load([], overrides))
    text = str(error.value)
    assert text.startswith(f"{module}: {dimension} is not a multiple of {block}")
    assert remedy in text and "\n" not in text


def test_unquantised_modules_may_have_any_width():
    base = {"model.dim": 72, "model.moe_hidden": 40, "model.head_dim": 6}
    tk.validate(tk.load([], {**base, "quant.experts": "none", "quant.kv": "none"}))


@pytest.mark.parametrize("name", ["quickstart.toml", "qat.toml", "bf16.toml", "qarl.toml"])
def test_shipped_configurations_are_valid(name, repository):
    overlays = [repository / "configs" / name] if name != "quickstart.toml" else []
    tk.validate(tk.load([repository / "configs" / "quickstart.toml", *overlays]))


def test_the_top_level_quickstart_is_the_packaged_one(repository):
    top = repository / "configs" / "quickstart.toml"
    assert top.is_symlink()
    assert top.resolve() == tk.quickstart().resolve()


def test_blocks_and_global_scales_are_those_of_the_numeric_profiles():
    from tracekit.numerics import PROFILES

    assert {name: PROFILES[name].block for name in BLOCK} == BLOCK
    assert {name for name in BLOCK if PROFILES[name].has_global} == TOKEN_SCALED


def test_objective_names_are_the_registrys():
    from tracekit.config.validate import _objective_names
    from tracekit.objectives import CORRECTIONS, LOSSES

    assert _objective_names() == {"algo.name": LOSSES, "algo.correction": CORRECTIONS}
