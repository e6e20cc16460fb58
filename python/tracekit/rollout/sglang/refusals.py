"""Ways to run SGLang under which records would be wrong: the engine does not start, and says why."""

from __future__ import annotations

import torch

from tracekit.errors import EngineError
from tracekit.numerics import profile_info
from tracekit.rollout.sglang.settings import Settings


def refuse_unsupported(args: object) -> None:
    """Raise EngineError for ways to run SGLang under which a slot's rows would not be its own."""
    refused = {
        "enable_hierarchical_cache": "prefixes that HiCache loads back get slots without rows",
        "enable_lmcache": "prefixes that LMCache loads back get slots without rows",
        "speculative_algorithm": "drafts move cache entries without their rows",
        "enable_two_batch_overlap": "two batches would share the buffers",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise EngineError(f"tracekit does not support {name}: {why}")
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        raise EngineError("tracekit does not support disaggregation_mode: transfers have no rows")
    backend = getattr(args, "moe_a2a_backend", "none") or "none"
    if backend != "none":
        raise EngineError(f"tracekit does not support moe_a2a_backend {backend}: rows arrive in another order")
    alone = {
        "pp_size": "other ranks' layers would be recorded as zeros",
        "dp_size": "ranks share buffers",
        "dcp_size": "a rank's cache has a part of each sequence",
        "attn_cp_size": "a rank computes a part of each sequence",
    }
    for name, why in alone.items():
        if getattr(args, name, 1) > 1:
            raise EngineError(f"tracekit does not support {name} above 1: {why}; start one engine a GPU")
    cache = getattr(args, "kv_cache_dtype", "auto")
    if cache not in ("auto", "bf16", "bfloat16"):
        raise EngineError(f"tracekit does not support kv_cache_dtype {cache}: it rounds again what the plugin rounded")
    if not getattr(args, "enable_return_routed_experts", False):
        raise EngineError("tracekit needs --enable-return-routed-experts: rows travel with the routed experts")


def refuse_cut_blocks(settings: Settings, model: object, args: object) -> None:
    """Raise EngineError where tensor parallelism would cut the blocks that the learner rounds the experts' hidden
    values in."""
    if settings.experts is None:
        return
    width, block = model.moe_intermediate_size, profile_info(settings.experts).block
    ranks = args.tp_size // (getattr(args, "ep_size", 1) or 1)
    if width % (ranks * block):
        raise EngineError(
            f"tracekit: {ranks} ranks cut the experts' {width} hidden values between blocks of {block}; "
            f"choose tp_size so that {block} divides each rank's share, or ep_size = tp_size"
        )


def refuse_packed(settings: Settings, runner: object) -> None:
    """Raise EngineError where the packed cache would not be read, or not be read right."""
    from tracekit.rollout.sglang.packed_attention import BACKENDS
    from tracekit.rollout.sglang.packed_pool import PROFILE, pool_class

    def refuse(what: str, todo: str) -> None:
        raise EngineError(f'tracekit: kv_pool = "packed" does not take {what}\n{todo}, or use kv_pool = "bf16"')

    args, pool = runner.server_args, runner.token_to_kv_pool
    if settings.kv != PROFILE:
        refuse(f"quant.kv = {settings.kv}", f"set quant.kv = {PROFILE}")
    if not isinstance(pool, pool_class()):
        refuse(f"a model whose cache is {type(pool).__name__}", "use a model with plain attention in every layer")
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    chosen = {getattr(args, name, None): name for name in names}
    for backend, name in chosen.items():
        if backend not in (None, *BACKENDS):
            refuse(f"{name} {backend}", f"use one of {', '.join(BACKENDS)}")
    if getattr(args, "enable_deterministic_inference", False):
        refuse("enable_deterministic_inference", "leave it out")
    if torch.device(runner.device).type == "cuda":
        if pool.head_dim % 128:
            refuse(f"heads of {pool.head_dim} values on a GPU", "its kernel needs multiples of 128")
        if "torch_native" in chosen:
            refuse("attention_backend torch_native on a GPU", "it would expand the whole cache: use triton")
    if _captures_prefill():
        refuse("a CUDA graph for prefill", "start the engine with --cuda-graph-backend-prefill disabled")
    for layer in runner.model.modules():
        if type(layer).__name__ != "RadixAttention":
            continue
        for name in (f"layers.{layer.layer_id}.k", f"layers.{layer.layer_id}.v"):
            if name not in settings.static_scales:
                refuse(f"{name} without a static scale", "put its encode scale into static_scales")
        if (what := _unlike(layer)) is not None:
            refuse(f"layer {layer.layer_id}'s {what}", "use a model without it")


def _unlike(layer: object) -> str | None:
    """What a `RadixAttention` has beside causal softmax attention over all tokens, if anything."""
    window = layer.sliding_window_size
    found = {
        "logit cap": layer.logit_cap,
        "window": window is not None and window > -1,
        "unequal heads": layer.qk_head_dim != layer.v_head_dim,
        "cross attention": getattr(layer, "is_cross_attention", False),
        "attention to later tokens": getattr(getattr(layer, "attn_type", None), "value", "decoder") != "decoder",
        "temperature by length": getattr(layer, "xai_temperature_len", -1) > 0,
        "scales of K and V": any(getattr(layer, f"{x}_scale_float", None) not in (None, 1.0) for x in "kv"),
    }
    return next((what for what, is_so in found.items() if is_so), None)


def _captures_prefill() -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    return any(check_cuda_graph_backend(Phase.PREFILL, b) for b in Backend.ALL if b != Backend.DISABLED)
