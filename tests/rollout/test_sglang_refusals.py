"""Ways to run SGLang under which records would be wrong: each is refused when the engine starts, with its reason."""

from types import SimpleNamespace

import pytest

from tracekit.errors import EngineError
from tracekit.rollout.sglang.refusals import refuse_cut_blocks, refuse_unsupported
from tracekit.rollout.sglang.settings import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_two_batch_overlap", True),
        ("disaggregation_mode", "prefill"),
        ("moe_a2a_backend", "deepep"),
        ("pp_size", 2),
        ("dp_size", 2),
        ("dcp_size", 2),
        ("attn_cp_size", 2),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("kv_cache_dtype", "fp4_mx_block16"),
        ("enable_return_routed_experts", False),
    ],
)
def test_it_is_refused(name, value):
    usual = {"enable_return_routed_experts": True, "kv_cache_dtype": "auto", "tp_size": 1, "moe_a2a_backend": "none"}
    refuse_unsupported(SimpleNamespace(**usual))
    with pytest.raises(EngineError, match=name.replace("_", ".")) as error:
        refuse_unsupported(SimpleNamespace(**{**usual, name: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("ranks", "expert_ranks", "cut"), [(2, 1, False), (4, 1, True), (4, 2, False), (4, 4, False)])
def test_ranks_that_cut_a_block_are_refused(ranks, expert_ranks, cut):
    settings, model = Settings(folder="x", experts="nvfp4-exact"), SimpleNamespace(moe_intermediate_size=32)
    args = SimpleNamespace(tp_size=ranks, ep_size=expert_ranks)
    if not cut:
        return refuse_cut_blocks(settings, model, args)
    with pytest.raises(EngineError, match="cut the experts' 32 hidden values") as error:
        refuse_cut_blocks(settings, model, args)
    assert "\n" not in str(error.value)
