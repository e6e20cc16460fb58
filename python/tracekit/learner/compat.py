"""What torchtitan 0.3.0 needs before it runs on a CPU or on torch 2.11 to 2.13.

`install()` must run before any other torchtitan import. Each patch names the place it mends; on a CUDA machine with
torch 2.14 none applies.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import resource
import sys
import types

import torch
import torch.distributed as dist

_installed = False


class _CPUDeviceModule(types.ModuleType):
    """`torch.cpu` plus the memory calls of torchtitan's `DeviceMemoryMonitor`."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def get_device_name(self, device=None) -> str:
        return "cpu"

    def get_device_properties(self, device=None):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=total)

    def memory_stats(self, device=None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device=None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def current_device(self) -> int:
        return 0  # torch.cpu answers "cpu", which barrier(device_ids=[...]) refuses


def _stub_triton_kernels() -> None:
    """`models/common/token_dispatcher.py` imports a triton module that only MinimalAsyncEP uses."""
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    stub = types.ModuleType(name)

    def missing(attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*args, **kwargs):
            raise RuntimeError(f"{attribute}: MinimalAsyncEP needs triton, which is not installed")

        return call

    stub.__getattr__ = missing
    sys.modules[name] = stub


def _polyfill_torch() -> None:
    """Names that torchtitan 0.3.0 imports and torch 2.11 to 2.13 lack."""
    import torch.distributed.fsdp as fsdp

    if not hasattr(dist, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        dist.set_timeout = _set_pg_timeout
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = dataclasses.make_dataclass(
            "DataParallelMeshDims", [("shard", object, None), ("replicate", object, None)]
        )
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False


def install() -> None:
    """Apply the patches once. Idempotent."""
    global _installed
    if _installed:
        return
    _polyfill_torch()
    if importlib.util.find_spec("triton") is None:
        _stub_triton_kernels()
    import torchtitan.tools.utils as utils

    if not torch.cuda.is_available():
        utils.device_type = "cpu"
        utils.device_module = _CPUDeviceModule("cpu")
    logging.getLogger().setLevel(logging.WARNING)  # torchtitan logs to the root logger at INFO
    _installed = True
