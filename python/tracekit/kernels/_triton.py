"""Triton where it is installed; without it the modules that define kernels still import, and run their references."""

from __future__ import annotations

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installations
    triton = None

    class _Absent:
        @staticmethod
        def constexpr(value):
            return value

        @staticmethod
        def jit(fn):
            return fn

    tl = _Absent

jit = tl.jit if triton is None else triton.jit
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The smallest power of two from n >= 1 on."""
    return 1 << (n - 1).bit_length()


def runs_triton(x: torch.Tensor) -> bool:
    """Whether kernels take x: it is on a CUDA device, or the interpreter is on. Otherwise the reference runs."""
    return triton is not None and (x.device.type == "cuda" or INTERPRET)


def hardware_casts(x: torch.Tensor) -> bool:
    """Whether fp32 -> E4M3 may use the hardware's saturating cast (the interpreter's is wrong, older GPUs lack it)."""
    return not INTERPRET and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)


def hardware_reciprocal(x: torch.Tensor) -> bool:
    """Whether rcp.approx.ftz.f32 runs and is the one whose table was measured (sm_90)."""
    return not INTERPRET and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) == (9, 0)
