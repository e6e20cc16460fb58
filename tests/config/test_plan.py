import pytest

from tracekit import config as tk
from tracekit.config import reference

MODEL = {"model.n_layers": 5, "model.dim": 64, "model.moe_hidden": 32, "model.n_kv_heads": 2, "model.head_dim": 32}


@pytest.mark.parametrize(
    ("spec", "layers"),
    [("all", [0, 1, 2, 3, 4]), ("last_half", [2, 3, 4]), ("last:2", [3, 4]), ("last:5", [0, 1, 2, 3, 4])],
)
def test_layers(spec, layers):
    assert tk.guided_layers(tk.load([], {**MODEL, "guidance.layers": spec})) == layers


def test_sites_carry_profile_rows_and_width_and_record_what_was_asked_for():
    overrides = {"quant.kv": "kv-mx16", "guidance.layers": "last:1", "guidance.sites": ["moe_input", "v"]}
    sites = {site.name: site for site in tk.plan(tk.load([], {**MODEL, **overrides}))}
    assert len(sites) == 20
    assert (sites["layers.4.moe_input"].planes, sites["layers.4.moe_input"].width) == (1, 64)
    assert (sites["layers.4.v"].planes, sites["layers.4.v"].width, sites["layers.4.v"].profile) == (2, 32, "kv-mx16")
    assert sites["layers.4.moe_hidden"].width == 32
    assert [name for name, site in sites.items() if site.scales] == ["layers.4.moe_input", "layers.4.v"]


def test_eight_bit_experts_are_rounded_and_not_recorded():
    config = tk.load([], {**MODEL, "quant.experts": "fp8-e4m3", "guidance.sites": ["k"]})
    sites = {site.name: site for site in tk.plan(config)}
    assert (sites["layers.0.moe_input"].block, sites["layers.0.moe_input"].profile) == (64, "fp8-e4m3")
    assert {site.name.split(".")[2] for site in tk.guided_sites(config)} == {"k"}


def test_bytes_per_token_are_codes_padded_to_bytes_plus_scales():
    config = tk.load([], {**MODEL, "guidance.bits": 3, "quant.global_scale": "token"})
    sizes = {site.name: site.bytes_per_token for site in tk.guided_sites(config)}
    assert sizes["layers.0.moe_input"] == 64 * 3 // 8 + 64 // 16 + 4
    assert sizes["layers.0.k"] == 2 * (32 * 3 // 8 + 32 // 16 + 4)
    static = tk.load([], {**MODEL, "guidance.bits": 1, "quant.experts": "mxfp4-rceil", "quant.kv": "none"})
    assert {site.name: site.bytes_per_token for site in tk.guided_sites(static)} == {
        f"layers.{layer}.moe_input": 64 // 8 + 64 // 32 for layer in range(5)
    }


def test_the_papers_setup_gives_the_papers_size():
    """TRACE: hidden 2048, the last 20 layers, one bit and an amortised scale: 7.5 KB a token."""
    paper = {"model.dim": 2048, "model.n_layers": 48, "guidance.layers": "last:20", "guidance.sites": ["moe_input"]}
    assert sum(site.bytes_per_token for site in tk.guided_sites(tk.load([], paper))) == 7680


@pytest.mark.parametrize("overrides", [{"guidance.bits": 0}, {"quant.experts": "none", "quant.kv": "none"}])
def test_nothing_is_recorded_without_bits_or_quantisation(overrides):
    assert tk.guided_sites(tk.load([], overrides)) == []


def test_the_reference_page_and_the_schema_are_current(repository, tmp_path):
    reference.write(tmp_path)
    for name in ("config.md", "config.schema.json"):
        assert (repository / "docs" / name).read_text() == (tmp_path / name).read_text(), "run `make docs`"


def test_the_json_schema_has_every_key():
    schema = reference.json_schema()
    for path in tk.to_flat(tk.Config()):
        node = schema
        for part in path.split("."):
            node = node["properties"][part]
        assert node["description"]
    assert schema["properties"]["guidance"]["properties"]["bits"]["maximum"] == 4
    assert schema["additionalProperties"] is False


def test_help_lists_every_key():
    text = reference.help_text(80)
    for path in tk.to_flat(tk.Config()):
        assert f"--{path.replace('_', '-')} " in text
