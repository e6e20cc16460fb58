"""SGLang's platform for a plain CPU: torch's own operators and nothing that must be compiled for it."""

from __future__ import annotations

import inspect
import os

import torch

VARIABLE = "TRACEKIT_SGLANG_CPU"
"""Set to 1 by the client for engines on a CPU; the platform stays away otherwise."""


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class, or None to leave the choice to SGLang."""
    return f"{__name__}.make_platform" if os.environ.get(VARIABLE) == "1" else None


def __getattr__(name: str):
    if name != "make_platform":
        raise AttributeError(name)
    from sglang.srt.platforms import interface
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    class NativeCpuPlatform(CpuSRTPlatform):
        """`SGLANG_USE_CPU_ENGINE` wants kernels that no package index has; an out-of-tree platform does without."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def support_cuda_graph(self) -> bool:
            return False

        def support_piecewise_cuda_graph(self) -> bool:
            return False

    if hasattr(interface, "PlatformCapabilities"):
        NativeCpuPlatform.capabilities = interface.PlatformCapabilities()
    else:  # up to 0.5.17 the platform names the classes that serve it
        NativeCpuPlatform.get_mha_kv_pool_cls = _mha_kv_pool
        NativeCpuPlatform.get_paged_allocator_cls = _paged_allocator
    return NativeCpuPlatform


def _mha_kv_pool(_platform: object) -> type:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from tracekit.rollout.sglang.packed_pool import pool_under
    from tracekit.rollout.sglang.settings import Settings

    settings = Settings.from_environment()
    packed = settings is not None and settings.kv_pool == "packed"
    return pool_under(settings.static_scales) if packed else MHATokenToKVPool


def _paged_allocator(_platform: object):
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    def allocator(size: int, page_size: int, **rest):
        if page_size != 1:
            raise ValueError(f"pages of {page_size} tokens: this SGLang has none but of one token on a plain CPU")
        return TokenToKVPoolAllocator(size, **rest)

    return allocator


def use_plain_memory() -> None:
    """Keep SGLang from asking for pinned host memory, which needs CUDA."""
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.state_capturer import base

    def plain(dims, dtype, device, pin_memory=False, allocator=None, **_):
        return torch.zeros(dims, dtype=dtype)

    def plain_host_cache(cache, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain
    if "device" not in inspect.signature(base.BaseHostCache.__init__).parameters:  # up to 0.5.17
        base.BaseHostCache.__init__ = plain_host_cache
