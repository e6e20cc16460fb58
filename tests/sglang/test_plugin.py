"""The plugin and SGLang's own request objects, without an engine."""

import gc
import os
import subprocess
import sys
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracekit import numerics
from tracekit.errors import EngineError
from tracekit.guidance import SiteSpec
from tracekit.rollout.sglang.capture import Rounder
from tracekit.rollout.sglang.plugin import Plugin
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.store import SlotStore


def test_a_request_that_is_forgotten_while_it_waits_leaves_no_rows():
    """Pushed out, then aborted in the queue: no hook hears of it."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    plugin = Plugin(Settings(folder="nowhere"))
    plugin.store = SlotStore(64, 4)
    plugin.store.put(np.arange(16), np.zeros((16, 4), np.uint8), 0)
    req = Req("step/r0", "", array("q", range(8)), SamplingParams(max_new_tokens=8), vocab_size=64)
    req.output_ids.extend([1, 2, 3])
    req.req_pool_idx = 0
    if hasattr(req, "kv"):
        req.kv = SimpleNamespace(req_pool_idx=0)
    pool = SimpleNamespace(req_to_token=torch.arange(16).reshape(1, 16))
    plugin.pushed_out(req=req, req_to_token_pool=pool)
    (kept,) = plugin._kept.values()
    assert len(kept) == 8 + 3 - 1
    plugin.pushed_out(req=req, req_to_token_pool=pool)  # again, before it has run on: the same rows
    assert len(plugin._kept) == 1
    del req, kept
    gc.collect()
    assert not plugin._kept


def test_sglangs_own_rounding_function_is_hooked(monkeypatch):
    """Its kernel needs a Blackwell GPU; what it returns is made here, by the function that it calls."""
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm
    from sglang.srt.plugins.hook_registry import HookRegistry

    def fp4_quantize(x, scale, block, use_ue8m0, swizzled):
        assert (block, use_ue8m0, swizzled) == (16, False, False)
        q = numerics.quantize(x, "nvfp4-exact", global_scale=scale)
        return q.packed, q.scales

    spec = SiteSpec(name="layers.0.moe_input", width=64, bits=4, global_scale=32.0)
    scales = {spec.name: 32.0}
    plugin = Plugin(Settings(folder="nowhere", experts="nvfp4-exact", sites=[spec], static_scales=scales))
    plugin.rounder = Rounder(plugin.settings, 8, torch.device("cpu"))
    for name in ("_hooks", "_patched"):
        monkeypatch.setattr(HookRegistry, name, getattr(HookRegistry, name).copy())
    monkeypatch.setattr(flashinfer_trtllm, "fp4_quantize", fp4_quantize, raising=False)
    monkeypatch.setattr(flashinfer_trtllm, "quantize_hidden_states_fp4", flashinfer_trtllm.quantize_hidden_states_fp4)
    plugin._see_native("modelopt_fp4", "flashinfer_trtllm_routed")

    def runner(layer, given):
        return flashinfer_trtllm.quantize_hidden_states_fp4(given.hidden_states, torch.tensor(32.0))

    x = torch.randn(8, 64).bfloat16()
    packed, bytes_ = plugin.experts(runner, SimpleNamespace(layer_id=0), SimpleNamespace(hidden_states=x))
    row = plugin.rounder.take(8)
    assert torch.equal(row[:, :32], packed) and torch.equal(row[:, 32:], bytes_.view(torch.uint8))


APART = """
from tracekit.rollout.sglang.plugin import register
register()
from sglang.srt.models import qwen3_moe, utils
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
for module in (utils, qwen3_moe):
    assert module.enable_fused_set_kv_buffer(object()) is False, module
"""


def test_models_do_not_write_k_and_v_with_rope():
    """On CUDA they would, unrounded. What they ask says no, in a module that has imported it before too."""
    environment = {**os.environ, **Settings(folder="nowhere", kv="nvfp4-exact").to_environment()}
    done = subprocess.run([sys.executable, "-c", APART], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("call", [((), {"save_kv_cache": False}), ((False,), {})])
def test_k_and_v_that_are_in_the_cache_already_are_an_error(call):
    """A model that stores them by another way than the one that is turned off."""
    settings = Settings(folder="nowhere", kv="nvfp4-exact", static_scales={"layers.0.k": 64.0, "layers.0.v": 64.0})
    plugin = Plugin(settings)
    plugin.rounder = Rounder(settings, 8, torch.device("cpu"))
    layer = SimpleNamespace(layer_id=0, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=32, v_head_dim=32)
    x = torch.randn(4, 64).bfloat16()
    rest, named = call
    with pytest.raises(EngineError, match="layer 0 writes K and V to the cache before attention"):
        plugin.attention(layer, x, x, x, object(), *rest, **named)
    (_, _, k, v, _), _ = plugin.attention(layer, x, x, x, object())
    assert k.shape == (4, 2, 32) and torch.equal(k, v)
