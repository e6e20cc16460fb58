"""QaRL's aligned forward: the trainer multiplies the same low-bit tensors that the rollout engine got, forwards only.

INT8 and E4M3 W8A8 (activations quantised here, a scale a token; weights as published, a scale a channel) run through
the hardware's own product where there is one, and the scales come on after it. Everything else is *emulated*: values
are dequantised into x's dtype, one rounding an operand, and multiplied there. Both are the same function up to that
rounding and the order of the sum; `docs/numerics.md` has the difference measured. The gradient is the straight-through
one of the emulated form in x's dtype: to x through the dequantised weight, to `master` through the dequantised x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.kernels.eight_bit import quantize_eight_bit
from tracekit.numerics import dequantize
from tracekit.numerics.eight_bit import E4M3
from tracekit.numerics.formats import unpack_codes
from tracekit.numerics.profiles import Profile, profile_info

_INT_ROWS = 32  # CUDA's integer product takes more than 16 rows


def is_w8a8(p: Profile) -> bool:
    """Whether p has eight bits an element and a scale a row: what products with scales outside the sum can take."""
    return p.bits == 8 and p.block == 0


def has_product(p: Profile, x: Tensor, inner: int, outer: int, cpu: bool = False) -> bool:
    """Whether the device of x multiplies p's codes itself, at [*, inner] x [outer, inner]; a CPU does if asked to."""
    if not is_w8a8(p) or inner % 16 or outer % 16:
        return False
    if x.device.type != "cuda":
        return cpu
    return torch.cuda.get_device_capability(x.device) >= ((8, 9) if isinstance(p, E4M3) else (8, 0))


def multiply_codes(
    p: Profile, codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[T, N] in dtype of u8 codes [T, K] and [N, K] under fp32 scales [T, 1] and [N, 1]; integers add up exactly."""
    if isinstance(p, E4M3):
        a, b = codes.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn).t()
        if dtype == torch.bfloat16:
            return torch._scaled_mm(a, b, scale_a=scales, scale_b=weight_scales.t(), out_dtype=dtype)
        one = torch.ones((), device=codes.device)
        sums = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
    else:
        a, rows = codes.view(torch.int8), len(codes)
        if a.device.type == "cuda" and rows < _INT_ROWS:
            a = torch.nn.functional.pad(a, (0, 0, 0, _INT_ROWS - rows))
        sums = torch._int_mm(a, weight.view(torch.int8).t())[:rows].float()
    return (sums * scales * weight_scales.t()).to(dtype)


def weight_values(p: Profile, weight_q: Tensor, scale: Tensor, g: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    """Dequantised weight [..., N, K]; codes of four bits come packed."""
    codes = unpack_codes(weight_q, k) if p.bits == 4 else weight_q
    return dequantize(codes, scale, p, g, dtype)


def activation_values(p: Profile, x: Tensor) -> Tensor:
    """x as the product sees it: quantised and dequantised under eight-bit profiles, itself under weight-only ones."""
    return quantize_eight_bit(x, p)[0] if p.bits == 8 else x


def product(
    p: Profile, x: Tensor, weight_q: Tensor, scale: Tensor, global_scale: Tensor | None, hardware: bool
) -> Tensor:
    """x [T, K] times a quantised weight [N, K]: [T, N] in x's dtype."""
    if hardware and len(x):
        _, codes, scales = quantize_eight_bit(x, p)
        return multiply_codes(p, codes, scales, weight_q, scale, x.dtype)
    w = weight_values(p, weight_q, scale, global_scale, x.shape[-1], x.dtype)
    return activation_values(p, x) @ w.t()


@torch.library.custom_op("tracekit::aligned_linear", mutates_args=())
def _aligned_linear(
    x: Tensor, master: Tensor | None, weight_q: Tensor, scale: Tensor, global_scale: Tensor | None, profile: str,
    hardware: bool,
) -> Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    out = product(profile_info(profile), rows, weight_q, scale, global_scale, hardware)
    return out.view(*x.shape[:-1], len(weight_q))


@_aligned_linear.register_fake
def _(x, master, weight_q, scale, global_scale, profile, hardware):
    return x.new_empty(*x.shape[:-1], weight_q.shape[0])


def _setup(ctx, inputs, output):
    x, master, weight_q, scale, global_scale, profile, _ = inputs
    ctx.save_for_backward(x, weight_q, scale, global_scale)
    ctx.profile, ctx.master_dtype = profile, None if master is None else master.dtype


def _backward(ctx, grad):
    x, weight_q, scale, global_scale = ctx.saved_tensors
    p = profile_info(ctx.profile)
    to_x = to_master = None
    if ctx.needs_input_grad[0]:
        to_x = grad @ weight_values(p, weight_q, scale, global_scale, x.shape[-1], grad.dtype)
    if ctx.needs_input_grad[1]:
        values = activation_values(p, x).flatten(0, -2)
        to_master = (grad.flatten(0, -2).t() @ values).to(ctx.master_dtype)
    return to_x, to_master, None, None, None, None, None


_aligned_linear.register_autograd(_backward, setup_context=_setup)


def check_weight(p: Profile, x: Tensor, master: Tensor | None, weight_q: Tensor, shape: tuple[int, ...]) -> None:
    """ConfigError unless weight_q holds codes of a weight of `shape`, and master, if any, is one."""
    stored = (*shape[:-1], -(-shape[-1] // 2) if p.bits == 4 else shape[-1])
    if tuple(weight_q.shape) != stored or weight_q.dtype != torch.uint8:
        raise ConfigError(f"codes of {p.name} must be u8 {stored}, not {weight_q.dtype} {tuple(weight_q.shape)}")
    if master is not None and tuple(master.shape) != shape:
        raise ConfigError(f"the master weight must be {shape}, not {tuple(master.shape)}")


def aligned_linear(
    x: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    profile: str | Profile,
    *,
    master: Tensor | None = None,
    global_scale: Tensor | None = None,
    codes_on_cpu: bool = False,
) -> Tensor:
    """x [..., K] times the quantised weight's transpose: [..., N] in x's dtype.

    `weight_q`, `scale` and `global_scale` are what `quantize(weight, profile)` has as `.packed`, `.scales` and
    `.global_scale` for a weight [N, K]. `master`, the weight [N, K] they came from, is not read: the straight-through
    gradient goes to it. On a CPU the product is emulated, unless `codes_on_cpu` asks for that of the codes.
    """
    p = profile_info(profile)
    check_weight(p, x, master, weight_q, (weight_q.shape[0], x.shape[-1]))
    hardware = has_product(p, x, x.shape[-1], weight_q.shape[0], codes_on_cpu)
    return _aligned_linear(x, master, weight_q, scale, global_scale, p.name, hardware)
