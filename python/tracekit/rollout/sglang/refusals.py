"""Ways to run SGLang under which records would be wrong: the engine does not start, and says why."""

from __future__ import annotations

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
