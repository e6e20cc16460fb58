import json
import subprocess
import sys
import tomllib

import pytest

from tracekit import config as tk
from tracekit.config import fields
from tracekit.errors import ConfigError


def write(path, text):
    path.write_text(text)
    return path


def test_no_file_gives_the_defaults():
    assert tk.load() == tk.Config()


def test_later_files_win_lists_replace_and_tables_merge(tmp_path):
    first = write(tmp_path / "a.toml", '[task.params]\nmin_terms = 2\nmax_terms = 4\n[guidance]\nsites = ["k", "v"]\n')
    second = write(tmp_path / "b.toml", 'seed = 3\n[task.params]\nmax_terms = 3\n[guidance]\nsites = ["moe_input"]\n')
    loaded = tk.load_with_sources([first, second], ["--seed", "5"])
    assert loaded.config.task.params == {"min_terms": 2, "max_terms": 3}
    assert loaded.config.guidance.sites == ["moe_input"]
    assert loaded.config.seed == 5
    assert loaded.sources == {
        "task.params.min_terms": str(first),
        "task.params.max_terms": str(second),
        "guidance.sites": str(second),
        "seed": "--seed",
    }


def test_another_task_does_not_inherit_the_parameters_of_the_last(tmp_path):
    first = write(tmp_path / "a.toml", "[task]\nname = 'chain_sum'\n[task.params]\nmin_terms = 3\n")
    same = tk.load([first], ["--task.name", "chain_sum", "--task.params.max_terms", "4"])
    assert same.task.params == {"min_terms": 3, "max_terms": 4}
    for flags in (["--task.name", "gcd", "--task.params.a", "1"], ["--task.params.a", "1", "--task.name", "gcd"]):
        other = tk.load_with_sources([first], flags)
        assert other.config.task.params == {"a": 1} and "task.params.min_terms" not in other.sources
    second = write(tmp_path / "b.toml", "[task.params]\nb = 2\n")
    assert tk.load([first, second], ["--task.name", "gcd"]).task.params == {}


def test_a_value_equal_to_its_default_has_no_source(tmp_path):
    path = write(tmp_path / "a.toml", f"seed = {tk.Config().seed}\n")
    assert tk.load_with_sources([path]).sources == {}


@pytest.mark.parametrize("key", ["rollout.group_size", "rollout.group-size"])
@pytest.mark.parametrize("joined", [False, True])
def test_flags_take_snake_and_kebab_case(key, joined):
    words = [f"--{key}=4"] if joined else [f"--{key}", "4"]
    assert tk.load([], words).rollout.group_size == 4


def test_flags_are_typed_by_the_schema():
    words = "--optim.lr 1e-5 --steps 2_000 --guidance.sites k,v --guidance.keep-steps -1 --quant.kv none".split()
    config = tk.load([], [*words, "--task.params.max_terms", "3", "--task.params.mode", "easy"])
    assert (config.optim.lr, config.steps, config.guidance.keep_steps) == (1e-5, 2000, -1)
    assert (config.guidance.sites, config.quant.kv) == (["k", "v"], "none")
    assert config.task.params == {"max_terms": 3, "mode": "easy"}
    assert tk.load([], ["--guidance.sites", '["k"]']).guidance.sites == ["k"]


def test_overrides_may_be_a_mapping():
    assert tk.load([], {"guidance.bits": 0, "task.params": {"max_terms": 2}}).guidance.bits == 0


def test_an_integer_is_a_float_where_one_is_wanted(tmp_path):
    value = tk.load([write(tmp_path / "a.toml", "[rollout]\ntemperature = 1\n")]).rollout.temperature
    assert type(value) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[guidance]\nbit = 1\n", "unknown key guidance.bit in {path}; the nearest valid key is guidance.bits"),
        ("[guidence]\nbits = 1\n", "unknown key guidence.bits in {path}; the nearest valid key is guidance.bits"),
        ("[algo]\ngroup_size = 4\n", "unknown key algo.group_size in {path}; the nearest valid key is rollout.group_"),
        ("guidance = 1\n", "guidance in {path} is a table, not a value"),
        ('[guidance]\nbits = "1"\n', "guidance.bits = '1' in {path}: expected an integer"),
        ("[guidance]\nbits = true\n", "guidance.bits = True in {path}: expected an integer"),
        ("[guidance]\nbits = 1.0\n", "guidance.bits = 1.0 in {path}: expected an integer"),
        ('[quant]\nkv = "fp8"\n', "quant.kv = 'fp8' in {path}: expected one of none, nvfp4-exact, mxfp4-rceil, kv-m"),
        ('[guidance]\nsites = "k"\n', "guidance.sites = 'k' in {path}: expected a list"),
        ('[guidance]\nsites = ["q"]\n', "guidance.sites = ['q'] in {path}: expected one of moe_input, k, v"),
        ("[optim]\nlr = nan\n", "optim.lr = nan in {path}: expected a finite number"),
        ("[task]\nparams = 3\n", "task.params = 3 in {path}: expected a table"),
        ("[guidance\n", "{path} is not valid TOML"),
    ],
)
def test_a_wrong_file_is_a_one_line_error(tmp_path, text, message):
    path = write(tmp_path / "a.toml", text)
    with pytest.raises(ConfigError) as error:
        tk.load([path])
    assert message.format(path=path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bits", "1"], "unknown key bits from --bits; the nearest valid key is guidance.bits"),
        (["--guidance.bits", "one"], "guidance.bits = 'one' from --guidance.bits: expected an integer"),
        (["--guidance.bits"], "--guidance.bits needs a value"),
        (["--guidance.bit", "--seed"], "unknown key guidance.bit from --guidance.bit"),
        (["--quant.experts", "fp4"], "expected one of none, nvfp4-exact, mxfp4-rceil"),
        (["--guidance", "1"], "guidance from --guidance is a table, not a value"),
        (["--optim.lr", "inf"], "expected a finite number"),
    ],
)
def test_a_wrong_flag_is_a_one_line_error(words, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as error:
        tk.load([], words)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="no such configuration file: nowhere.toml"):
        tk.load(["nowhere.toml"])


def test_the_written_toml_repeats_the_configuration(tmp_path):
    params = {"max_terms": 3, "odd key": 'a "quoted"\n\x7f é', "nested": {"list": [1, 2.5, True]}, "empty": {}}
    config = tk.load([], {"task.params": params, "optim.lr": 1e-5, "guidance.sites": ["v"], "seed": 7})
    text = tk.to_toml(config, {"seed": "--seed", "task.params.max_terms": "a\nb.toml"})
    assert tk.load([write(tmp_path / "config.toml", text)]) == config
    assert tomllib.loads(text)["task"]["params"] == params


def test_the_resolved_json_holds_every_value_and_the_sources():
    loaded = tk.load_with_sources([], ["--seed", "5"])
    resolved = json.loads(tk.to_json(loaded.config, loaded.sources))
    assert resolved == {"config": tk.to_dict(loaded.config), "sources": {"seed": "--seed"}}


def test_every_key_has_a_text():
    assert [leaf.path for leaf in fields.leaves(tk.Config).values() if not leaf.doc.endswith(".")] == []


def test_configuration_needs_no_torch():
    code = """
import sys
from tracekit import config
config.validate(config.load([config.quickstart()]))
config.plan(config.load())
assert not {"torch", "numpy", "reasoning_gym", "rich"} & set(sys.modules), "heavy import"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
