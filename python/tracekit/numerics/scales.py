"""Global encode scales: the factor g that brings a tensor's (or a token's, or an expert's) maximum to 6 * 448.

g is stored and passed as the encode scale; the decode scale is fl(1/g) and never the other way round, because
fl(2688/a) and fl(1/fl(a/2688)) differ in the last bit for a quarter of all fp32 maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import ConfigError
from tracekit.numerics.formats import INFINITY_BITS, MAGNITUDE_BITS, constant
from tracekit.numerics.profiles import FLT_MAX, Profile, profile_info


def global_scale_for(
    amax: Tensor | float,
    *,
    headroom: float = 1.0,
    power_of_two: bool = False,
    profile: str | Profile = "nvfp4-exact",
) -> Tensor:
    """Encode scale g = min(2688 / (headroom * amax), FLT_MAX), in fp32; 1 where that is zero, NaN or amax is zero.

    2688 is `profile`'s range; for a profile whose global scale is the decode scale, the result is that,
    headroom * amax / 2688 (rounded up by `power_of_two`).

    `amax` is a number or a tensor of any shape, >= 0. `power_of_two` rounds g down to a power of two: multiplying by
    it is exact, so a tensor-core path that applies it after the product loses nothing.
    """
    amax = torch.as_tensor(amax, dtype=torch.float32)
    # torch.div: `number / tensor` would multiply by a reciprocal, which rounds twice
    p = profile_info(profile)
    reach, whole = amax * headroom, amax.new_tensor(p.scale_range)
    g = torch.where(amax > 0, torch.div(reach, whole) if p.decode_global else torch.div(whole, reach), 1.0)
    g = g.clamp(max=FLT_MAX)
    g = torch.where(g > 0, g, 1.0)
    if power_of_two:
        bits = g.view(torch.int32) + (0x7FFFFF if p.decode_global else 0)
        g = (bits & 0x7F800000).clamp(min=1 << 23).view(torch.float32)
    return g


def absolute_maximum(x: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False) -> Tensor:
    """max |x| in fp32, ignoring NaN (as the hardware's maximum does); 0 for an empty reduction."""
    bits = x.detach().to(torch.float32).view(torch.int32) & MAGNITUDE_BITS
    bits = torch.where(bits > INFINITY_BITS, 0, bits)
    dim = tuple(range(x.dim())) if dim is None else dim
    axes = (dim,) if isinstance(dim, int) else dim
    if any(x.shape[d] == 0 for d in axes):
        return x.new_zeros((), dtype=torch.float32) + x.detach().to(torch.float32).sum(dim=axes, keepdim=keepdim)
    return bits.amax(dim=axes, keepdim=keepdim).view(torch.float32)


def token_global_scale(x: Tensor, profile: str | Profile = "nvfp4-exact") -> Tensor:
    """Global scale of each token: x [..., K] -> fp32 [..., 1]."""
    return global_scale_for(absolute_maximum(x, -1, keepdim=True), profile=profile)


def expert_global_scale(*weights: Tensor, profile: str | Profile, power_of_two: bool = False) -> Tensor | None:
    """Encode scale of each expert over one or several weights that a kernel multiplies under one scale.

    `weights` are [E, out, in] with equal E (`out` and `in` may differ): pass gate and up projections together, down
    alone. Returns fp32 [E, 1, 1], or None for a profile without a global scale.
    """
    if not profile_info(profile).has_global:
        return None
    if len({w.shape[0] for w in weights}) != 1 or any(w.dim() != 3 for w in weights):
        shapes = [tuple(w.shape) for w in weights]
        raise ConfigError(f"expert weights must be [E, out, in] with one E, not {shapes}")
    amax = absolute_maximum(weights[0], (1, 2), keepdim=True)
    for w in weights[1:]:
        amax = torch.maximum(amax, absolute_maximum(w, (1, 2), keepdim=True))
    return global_scale_for(amax, power_of_two=power_of_two, profile=profile)


def resolve_global_scale(
    x: Tensor, profile: Profile, amax: Tensor | float | str | None, global_scale: Tensor | float | None
) -> Tensor | None:
    """The encode scale a call asks for, as fp32 on x's device: `global_scale`, or 2688/`amax`, or `amax="token"`.

    None for a profile without one (then both arguments are ignored). ConfigError when an NVFP4 profile gets neither:
    the maximum of a forward's own batch is never taken, because it depends on who else is in the batch.
    """
    if not profile.has_global:
        return None
    if global_scale is not None:
        if isinstance(global_scale, Tensor):
            g = global_scale.detach()
            return g if g.dtype == torch.float32 and g.device == x.device else g.to(x.device, torch.float32)
        return constant(float(global_scale), x.device)
    if isinstance(amax, str):
        if amax != "token":
            raise ConfigError(f'amax must be a number, a tensor or "token", not {amax!r}')
        return token_global_scale(x, profile)
    if amax is None:
        raise ConfigError(
            f'{profile.name} needs a global scale\npass global_scale=, amax= or amax="token" (one scale a token)'
        )
    return global_scale_for(amax, profile=profile).to(x.device)
