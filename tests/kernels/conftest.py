"""Kernels run on the GPU if there is one, else in Triton's interpreter; the switch has to come before triton does."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

NAN, INF = float("nan"), float("inf")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device():
    """Where the kernels under test run. Skips where neither a GPU nor the interpreter can take them."""
    pytest.importorskip("triton")
    from tracekit.kernels import _triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not _triton.runs_triton(torch.empty(1, device=device)):
        pytest.fail("tracekit.kernels was imported before TRITON_INTERPRET was set")
    return device


def make_hard_rows(rows=48, k=64, seed=0, dtype=torch.float32):
    """Rows over six decades, with NaN of both signs, infinities, minus zero, zero rows, grid values and midpoints."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) * torch.exp(2.5 * torch.randn(rows, 1, generator=g))
    x[0, :5] = torch.tensor([NAN, -NAN, INF, -0.0, 1.0])
    x[1] = 0
    x[2, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2) * torch.tensor([1.0, -1.0]).repeat(8)
    x[3] = torch.randint(-6, 7, (k,), generator=g).float()
    x[4] = 2.0 ** torch.randint(-30, 10, (k,), generator=g)
    x[5, k // 2 :] = 0
    x[6] = 1e-6 * x[6]
    x[7] = 1e6
    return x.to(dtype)


@pytest.fixture
def hard_rows():
    """`make_hard_rows`, for any number of rows, seed and dtype."""
    return make_hard_rows


@pytest.fixture
def every_bf16():
    """All 65 536 bf16 values, [2048, 32]; the NaN among them too."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(2048, 32).clone()
