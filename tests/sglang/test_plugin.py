"""The plugin and SGLang's own request objects, without an engine."""

import gc
import os
import subprocess
import sys
from array import array
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracekit import numerics
from tracekit.errors import EngineError
from tracekit.guidance import SiteSpec
from tracekit.rollout.sglang.capture import Rounder
from tracekit.rollout.sglang.plugin import UPDATER, Plugin
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


def test_routed_experts_are_not_those_of_the_next_forward(monkeypatch):
    """SGLang 0.5.17 hands out its device buffer, which the next forward writes while the copy stream may still read."""
    from sglang.srt.state_capturer import base, routed_experts

    capturer = object.__new__(base.BaseTopkCapturer)
    capturer.device_cache = base.BaseDeviceCache(8, 2, 2, "cpu", "routed_experts")
    capturer.topk_size, capturer.host_cache = 2, SimpleNamespace(buffer=torch.zeros(16, 2, 2, dtype=torch.int32))
    monkeypatch.setattr(routed_experts, "get_global_experts_capturer", lambda: capturer)

    def forward(experts):
        for layer in range(2):
            capturer.capture(layer, torch.full((3, 2), experts, dtype=torch.int32))
        batch = SimpleNamespace(out_cache_loc=torch.arange(3), out_cache_loc_virtual=None)
        inner = capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True)
        out = SimpleNamespace(routed_experts_output=inner)
        return Plugin(Settings(folder="nowhere")).forward(out, SimpleNamespace(is_draft_worker=False), batch)

    first = forward(5)
    forward(6)
    first.routed_experts_output.finalize()
    assert (capturer.host_cache.buffer[:3] == 5).all()


def experts_layer(**more):
    settings = Settings(
        folder="nowhere", experts="nvfp4-exact", static_scales={f"layers.0.moe_{k}": 64.0 for k in ("input", "hidden")}
    )
    plugin = Plugin(settings)
    plugin.rounder = Rounder(settings, 8, torch.device("cpu"))
    given = namedtuple("Given", "hidden_states")(torch.randn(4, 64).bfloat16())
    return plugin, SimpleNamespace(layer_id=0, **more), given


def test_experts_that_hide_their_second_input_are_an_error():
    """A runner that makes it inside its kernel: nothing would round it."""
    plugin, layer, given = experts_layer()
    with pytest.raises(EngineError, match="layer 0 hid the input of their second GEMM"):
        plugin.experts(lambda layer, given: given.hidden_states, layer, given)

    def seen(layer, given):
        return plugin.hidden(given.hidden_states)

    plugin.experts(seen, layer, given)
    with pytest.raises(EngineError, match="hid the input"):  # once seen is not for ever
        plugin.experts(lambda layer, given: given.hidden_states, layer, given)
    plugin.experts(lambda layer, given: given.hidden_states, layer, given._replace(hidden_states=torch.zeros(0, 64)))
    plugin, layer, given = experts_layer(moe_ep_size=2)  # this rank may have none of these tokens
    plugin.experts(lambda layer, given: given.hidden_states, layer, given)


def test_shared_experts_among_the_routed_ones_are_an_error():
    plugin, layer, given = experts_layer(num_fused_shared_experts=1)
    with pytest.raises(EngineError, match="layer 0 runs shared experts as routed ones") as error:
        plugin.experts(lambda layer, given: plugin.hidden(given.hidden_states), layer, given)
    assert "--disable-shared-experts-fusion" in str(error.value)


def test_a_recorded_site_that_the_model_does_not_have_is_an_error():
    """Its first layers may be dense; records would be zeros."""
    sites = [SiteSpec(name=f"layers.{i}.moe_input", width=64, bits=1, global_scale=64.0) for i in range(2)]
    scales = {site.name: 64.0 for site in sites}
    plugin = Plugin(Settings(folder="nowhere", experts="nvfp4-exact", sites=sites, static_scales=scales))
    plugin.rounder, plugin.store = Rounder(plugin.settings, 8, torch.device("cpu")), object()
    plugin.rounder.round("layers.1.moe_input", torch.randn(4, 64).bfloat16(), "nvfp4-exact")
    out, batch = SimpleNamespace(routed_experts_output=None), SimpleNamespace(out_cache_loc=torch.arange(4))
    with pytest.raises(EngineError, match="does not come to layers.0.moe_input"):
        plugin.forward(out, SimpleNamespace(is_draft_worker=False), batch)


SETTLED = f"""
import torch
from tracekit.rollout.sglang.plugin import register
register()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater
done = []
torch.cuda.is_available, torch.cuda.synchronize = (lambda: True), (lambda *_: done.append(1))
for n, source in enumerate(("disk", "distributed", "tensor", "ipc"), 1):
    target = f"update_weights_from_{{source}}"
    assert "{UPDATER}." + target in HookRegistry._patched
    try:
        getattr(Updater, target)(None, None)
    except AttributeError:
        pass  # there is no updater: what counts is what comes before it
    assert len(done) == n, source
"""


def test_weights_are_not_written_under_a_forward():
    """SGLang writes them on another stream than the forward's, and a pause in place does not wait for it."""
    environment = {**os.environ, **Settings(folder="nowhere").to_environment()}
    done = subprocess.run([sys.executable, "-c", SETTLED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
