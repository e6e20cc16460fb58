"""SGLang's platform for a plain CPU: torch's own operators and nothing that must be compiled for it."""

from __future__ import annotations

import os

VARIABLE = "TRACEKIT_SGLANG_CPU"
"""Set to 1 by the client for engines on a CPU; the platform stays away otherwise."""


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class, or None to leave the choice to SGLang."""
    return f"{__name__}.make_platform" if os.environ.get(VARIABLE) == "1" else None


def __getattr__(name: str):
    if name != "make_platform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities

    class NativeCpuPlatform(CpuSRTPlatform):
        """`SGLANG_USE_CPU_ENGINE` wants kernels that no package index has; an out-of-tree platform does without."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def support_cuda_graph(self) -> bool:
            return False

        def support_piecewise_cuda_graph(self) -> bool:
            return False

    return NativeCpuPlatform
