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
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, name, None) not in (None, *BACKENDS):
            refuse(f"{name} {getattr(args, name)}", f"use one of {', '.join(BACKENDS)}")
    if getattr(args, "enable_deterministic_inference", False):
        refuse("enable_deterministic_inference", "leave it out")
    on_gpu = torch.device(runner.device).type == "cuda"
    if on_gpu and pool.head_dim % 128:
        refuse(f"heads of {pool.head_dim} values on a GPU", "its kernel needs multiples of 128")
    for layer in runner.model.modules():
        if type(layer).__name__ != "RadixAttention":
            continue
        for name in (f"layers.{layer.layer_id}.k", f"layers.{layer.layer_id}.v"):
            if name not in settings.static_scales:
                refuse(f"{name} without a static scale", "put its encode scale into static_scales")
        window = layer.sliding_window_size
        if layer.logit_cap or (window is not None and window > -1) or layer.qk_head_dim != layer.v_head_dim:
            refuse(f"layer {layer.layer_id}'s logit cap, window or unequal heads", "use a model without them")
