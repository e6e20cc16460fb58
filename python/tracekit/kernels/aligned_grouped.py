"""The aligned forward (`aligned_linear`) of grouped experts: consecutive rows of x, an expert each run of rows.

E4M3 on Hopper is one grouped product. Elsewhere experts go one after the other, which reads `ends` on the host: one
synchronisation, so not inside a CUDA graph. So do all backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels.aligned_linear import activation_values, check_weight, has_product, product, weight_values
from tracekit.kernels.eight_bit import quantize_eight_bit
from tracekit.numerics.eight_bit import E4M3
from tracekit.numerics.profiles import Profile, profile_info


def has_grouped_product(p: Profile, x: Tensor, inner: int, outer: int) -> bool:
    """Whether the device of x multiplies E4M3 groups by itself: Hopper does, with bf16 results."""
    one = isinstance(p, E4M3) and x.dtype == torch.bfloat16 and has_product(p, x, inner, outer)
    return one and torch.cuda.get_device_capability(x.device) == (9, 0)


def runs_of(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, rows) of experts with any rows, from the ends of their runs."""
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    return [(i, slice(a, b)) for i, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]


def _of_expert(t: Tensor | None, i: int) -> Tensor | None:
    return t if t is None or t.dim() < 3 else t[i]


@torch.library.custom_op("tracekit::aligned_grouped", mutates_args=())
def _aligned_grouped(
    x: Tensor, master: Tensor | None, weight_q: Tensor, scale: Tensor, global_scale: Tensor | None, ends: Tensor,
    profile: str, hardware: bool, grouped: bool,
) -> Tensor:  # fmt: skip
    p = profile_info(profile)
    if grouped and len(x):
        _, codes, scales = quantize_eight_bit(x, p)
        a, b = codes.view(torch.float8_e4m3fn), weight_q.view(torch.float8_e4m3fn).transpose(-2, -1)
        return torch._scaled_grouped_mm(a, b, scales[:, 0], scale[..., 0], offs=ends, out_dtype=x.dtype)
    out = x.new_zeros(len(x), weight_q.shape[1])
    for i, rows in runs_of(ends):
        out[rows] = product(p, x[rows], weight_q[i], scale[i], _of_expert(global_scale, i), hardware)
    return out


@_aligned_grouped.register_fake
def _(x, master, weight_q, scale, global_scale, ends, profile, hardware, grouped):
    return x.new_empty(x.shape[0], weight_q.shape[1])


def _setup(ctx, inputs, output):
    x, master, weight_q, scale, global_scale, ends, profile, _, _ = inputs
    ctx.save_for_backward(x, weight_q, scale, global_scale, ends)
    ctx.profile, ctx.master_dtype = profile, None if master is None else master.dtype


@torch.library.custom_op("tracekit::aligned_grouped_backward", mutates_args=())
def _grouped_backward(
    grad: Tensor, x: Tensor, weight_q: Tensor, scale: Tensor, global_scale: Tensor | None, ends: Tensor, profile: str,
    with_x: bool, with_master: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients to x [T, K] and to the master weights [E, N, K], in grad's dtype; empty where not wanted."""
    p, inner = profile_info(profile), x.shape[-1]
    to_x, to_master = _gradients(grad, x, weight_q, with_x, with_master)
    values = activation_values(p, x) if with_master else x
    for i, rows in runs_of(ends):
        if with_x:
            g = _of_expert(global_scale, i)
            to_x[rows] = grad[rows] @ weight_values(p, weight_q[i], scale[i], g, inner, grad.dtype)
        if with_master:
            to_master[i] = grad[rows].t() @ values[rows]
    return to_x, to_master


def _gradients(grad: Tensor, x: Tensor, weight_q: Tensor, with_x: bool, with_master: bool) -> tuple[Tensor, Tensor]:
    shape = (weight_q.shape[0], weight_q.shape[1], x.shape[-1])
    return grad.new_zeros(x.shape if with_x else (0,)), grad.new_zeros(shape if with_master else (0,))


@_grouped_backward.register_fake
def _(grad, x, weight_q, scale, global_scale, ends, profile, with_x, with_master):
    return _gradients(grad, x, weight_q, with_x, with_master)


def _backward(ctx, grad):
    with_x, with_master = ctx.needs_input_grad[:2]
    to_x, to_master = _grouped_backward(grad, *ctx.saved_tensors, ctx.profile, with_x, with_master)
    to_master = to_master.to(ctx.master_dtype) if with_master else None
    return to_x if with_x else None, to_master, None, None, None, None, None, None, None


_aligned_grouped.register_autograd(_backward, setup_context=_setup)


def aligned_grouped(
    x: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    ends: Tensor,
    profile: str | Profile,
    *,
    master: Tensor | None = None,
    global_scale: Tensor | None = None,
    codes_on_cpu: bool = False,
) -> Tensor:
    """Rows of x [T, K], sorted by expert, times their experts' quantised weights: [T, N] in x's dtype.

    `weight_q`, `scale` and `global_scale` (a scalar, or [E, 1, 1]) are those of weights [E, N, K], `master` the
    weights themselves (for their gradient only). `ends` int32 [E]: where each expert's rows end; the last must be T.
    `codes_on_cpu` as in `aligned_linear`.
    """
    p = profile_info(profile)
    if x.dim() != 2 or weight_q.dim() != 3 or ends.shape != weight_q.shape[:1] or ends.dtype != torch.int32:
        raise ConfigError(
            f"grouped experts take x [T, K], codes [E, N, K] and int32 ends [E],\nnot {tuple(x.shape)}, "
            f"{tuple(weight_q.shape)} and {ends.dtype} {tuple(ends.shape)}"
        )
    experts, outer, inner = len(weight_q), weight_q.shape[1], x.shape[-1]
    check_weight(p, x, master, weight_q, (experts, outer, inner))
    hardware, grouped = has_product(p, x, inner, outer, codes_on_cpu), has_grouped_product(p, x, inner, outer)
    return _aligned_grouped(x, master, weight_q, scale, global_scale, ends, p.name, hardware, grouped)
