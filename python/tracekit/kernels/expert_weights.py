"""Expert weights for a quantisation-aware forward and for publication, from one pass over them.

The trainer's forward multiplies by the dequantised values; the rollout engine gets the packed bytes they stand for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tracekit.kernels.quantize_pack import quantize_pack
from tracekit.numerics.profiles import Profile, profile_info
from tracekit.numerics.quantize import straight_through
from tracekit.numerics.scales import expert_global_scale


class PublishedWeights(NamedTuple):
    """`values` [E, out, in] in the weight's dtype (gradient 1 to the weight), `packed` u8 [E, out, ceil(in/2)],
    `scales` u8 [E, out, ceil(in/block)], `global_scale` fp32 [E, 1, 1] or None.
    """

    values: Tensor
    packed: Tensor
    scales: Tensor
    global_scale: Tensor | None


def fake_quantize_experts(
    *weights: Tensor, profile: str | Profile, power_of_two: bool = False
) -> tuple[PublishedWeights, ...]:
    """Quantise expert weights [E, out, in] that share one global scale an expert (gate and up; or down alone)."""
    p = profile_info(profile)
    g = expert_global_scale(*weights, profile=p, power_of_two=power_of_two)
    out = []
    for w in weights:
        with torch.no_grad():
            packed, scales, _, values = quantize_pack(w, p, global_scale=g, with_values=True)
        out.append(PublishedWeights(straight_through(w, values), packed, scales, g))
    return tuple(out)
