"""The packed cache and SGLang's own classes, without an engine."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tracekit import numerics
from tracekit.errors import EngineError
from tracekit.rollout.sglang.packed_pool import packed_bytes, pool_class
from tracekit.rollout.sglang.refusals import refuse_packed
from tracekit.rollout.sglang.settings import Settings


def pool(cls, heads=2, dim=32, **more):
    return cls(
        64, 1, torch.bfloat16, heads, dim, layer_num=2, device="cpu", enable_memory_saver=False, start_layer=0,
        enable_alt_stream=False, **more,
    )  # fmt: skip


def test_the_pool_itself():
    """9/32 of the bytes; rows that were not rounded are refused, and so is a reader that knows nothing of it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    packed, plain = pool(pool_class()), pool(MHATokenToKVPool)
    assert sum(packed.get_kv_size_bytes()) == packed_bytes(sum(plain.get_kv_size_bytes()))
    assert packed_bytes(32) == 9
    layer = SimpleNamespace(layer_id=1)
    slots, x = torch.tensor([3, 5]), torch.randn(2, 2, 32).bfloat16()
    with pytest.raises(EngineError, match="layer 1 reached the packed cache without being rounded"):
        packed.set_kv_buffer(layer, slots, x, x)
    q = numerics.quantize(x, "nvfp4-exact", global_scale=torch.tensor(64.0))
    packed.static_scales = {"layers.1.k": 64.0, "layers.1.v": 64.0}
    packed.arriving.put(1, (q.packed, q.scales), (q.packed, q.scales))
    packed.set_kv_buffer(layer, slots, x, x)
    with pytest.raises(EngineError, match="read by tracekit's attention only"):
        packed.get_key_buffer(1)
    packed.reader = object()
    assert packed.get_key_buffer(1).shape == (0, 2, 32)
    packed.select(slots.flip(0))
    for values in packed.get_kv_buffer(1):
        assert torch.equal(values, q.dequantize().flip(0))
    with pytest.raises(EngineError, match="no packed cache of 1 heads of 32"):
        pool(pool_class(), heads=1)


@pytest.fixture
def parts(monkeypatch):
    """What `refuse_packed` looks at, of an engine that it takes."""
    from sglang.srt.model_executor import cuda_graph_config

    graph = SimpleNamespace(prefill="disabled")
    monkeypatch.setattr(
        cuda_graph_config, "check_cuda_graph_backend", lambda phase, name: getattr(graph, phase) == name
    )
    layer = type("RadixAttention", (torch.nn.Module,), {})()
    vars(layer).update(layer_id=0, sliding_window_size=-1, logit_cap=0.0, qk_head_dim=32, v_head_dim=32)
    vars(layer).update(attn_type=SimpleNamespace(value="decoder"), xai_temperature_len=-1, k_scale_float=1.0)
    args = SimpleNamespace(attention_backend="torch_native", decode_attention_backend=None)
    model = torch.nn.ModuleList([layer])
    runner = SimpleNamespace(server_args=args, token_to_kv_pool=pool(pool_class()), device="cpu", model=model)
    settings = Settings(folder="x", kv="nvfp4-exact", kv_pool="packed")
    settings.static_scales = {"layers.0.k": 64.0, "layers.0.v": 64.0}
    return SimpleNamespace(settings=settings, args=args, layer=layer, runner=runner, graph=graph)


@pytest.mark.parametrize(
    "part, change, why",
    [
        ("settings", {"kv": "mxfp4-rceil"}, "quant.kv = mxfp4-rceil"),
        ("settings", {"static_scales": {}}, "layers.0.k without a static scale"),
        ("args", {"attention_backend": "flashinfer"}, "attention_backend flashinfer"),
        ("args", {"decode_attention_backend": "fa3"}, "decode_attention_backend fa3"),
        ("args", {"enable_deterministic_inference": True}, "enable_deterministic_inference"),
        ("layer", {"logit_cap": 30.0}, "layer 0's logit cap"),
        ("layer", {"sliding_window_size": 128}, "layer 0's window"),
        ("layer", {"v_head_dim": 16}, "layer 0's unequal heads"),
        ("layer", {"is_cross_attention": True}, "layer 0's cross attention"),
        ("layer", {"attn_type": SimpleNamespace(value="decoder_bidirectional")}, "layer 0's attention to later tokens"),
        ("layer", {"xai_temperature_len": 1024}, "layer 0's temperature by length"),
        ("layer", {"k_scale_float": 0.5}, "layer 0's scales of K and V"),
        ("graph", {"prefill": "breakable"}, "a CUDA graph for prefill"),
        ("runner", {"device": "cuda"}, "heads of 32 values on a GPU"),
    ],
)
def test_refusals(parts, part, change, why):
    refuse_packed(parts.settings, parts.runner)
    for name, value in change.items():
        target = getattr(parts, part)
        vars(target).update({name: value}) if part != "settings" else setattr(target, name, value)
    refused(parts, why)


def test_refusals_of_other_pools(parts):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    parts.runner.token_to_kv_pool = pool(MHATokenToKVPool)
    refused(parts, "a model whose cache is MHATokenToKVPool")
    parts.runner.token_to_kv_pool, parts.runner.device = pool(pool_class(), dim=128), "cuda"
    refused(parts, "attention_backend torch_native on a GPU")
    parts.args.attention_backend = "triton"
    refuse_packed(parts.settings, parts.runner)


def test_heads_before_tokens_are_refused(monkeypatch):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if not hasattr(pool(MHATokenToKVPool), "use_hnd"):
        pytest.skip("this SGLang has one order of the cache")
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(EngineError, match="heads, then tokens\nunset SGLANG_USE_HND_KVCACHE"):
        pool(pool_class())


def refused(parts, why):
    """With what to do about it, in two lines."""
    with pytest.raises(EngineError) as error:
        refuse_packed(parts.settings, parts.runner)
    assert why in str(error.value) and str(error.value).count("\n") == 1 and 'kv_pool = "bf16"' in str(error.value)


SIZES = """
from types import SimpleNamespace

import torch
from sglang.srt.model_executor import pool_configurator
from sglang.srt.plugins.hook_registry import HookRegistry

from tracekit.rollout.sglang.plugin import register

pool_configurator.get_parallel = lambda: SimpleNamespace(attn_tp_size=2, attn_dcp_size=1)
config = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
model = SimpleNamespace(get_num_kv_heads=lambda *_: 4, head_dim=128, v_head_dim=128, hf_config=config)
cache = SimpleNamespace(
    model_config=model, kv_cache_dtype=torch.bfloat16, use_mla_backend=False, is_draft_worker=True,
    server_args=SimpleNamespace(enable_hisparse=False), layer_info=SimpleNamespace(start_layer=0, end_layer=6),
)

def count():
    configurator = pool_configurator.DefaultPoolConfigurator.__new__(pool_configurator.DefaultPoolConfigurator)
    configurator.kv_cache_dtype_str, configurator._fixed_overhead_bytes = "auto", 0
    configurator._cell_size = configurator._compute_cell_size(cache, 6)
    print(configurator._cell_size, configurator.calculate_pool_sizes(2**30, 64).max_total_num_tokens)

count()
register()
HookRegistry.apply_hooks()
count()
"""


def test_the_same_memory_holds_32_ninths_of_the_tokens():
    """By SGLang's own count of the bytes of a token and of the tokens of a GiB, before and after the plugin."""
    environment = {**os.environ, **Settings(folder="nowhere", kv="nvfp4-exact", kv_pool="packed").to_environment()}
    done = subprocess.run([sys.executable, "-c", SIZES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, packed = 2 * 2 * 4 * 128 * 6, 2 * 4 * (64 + 8) * 6
    counted = [int(n) for n in done.stdout.split()[-4:]]
    assert counted == [plain, 2**30 // plain // 64 * 64, packed, 2**30 // packed // 64 * 64]
