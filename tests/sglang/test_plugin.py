"""The plugin and SGLang's own request objects, without an engine."""

import gc
from array import array
from types import SimpleNamespace

import numpy as np
import torch

from tracekit import numerics
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
