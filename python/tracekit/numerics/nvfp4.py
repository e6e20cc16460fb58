"""NVFP4 chains: blocks of 16 under an E4M3 scale and a global scale, each library's order of operations its own.

All arithmetic is fp32, one rounding an operation, left to right as written; q = e2m1(z). `x / y` is a true division.
The chains differ on ordinary bf16 data in up to one block of a hundred; `nvfp4-exact` alone is free of approximate
reciprocals and the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracekit.numerics.base import FLT_MAX, ONE_SIXTH, Profile, per_block
from tracekit.numerics.formats import constant, e4m3_encode_positive
from tracekit.numerics.reciprocal import approximate_reciprocal


@dataclass(frozen=True)
class NVFP4Exact(Profile):
    """TransformerEngine's chain, and FlashInfer's with fast math off; the only NVFP4 chain that every device repeats.

    s = e4m3(amax * (g * fl(1/6))); z = x * min(1 / (s * (1/g)), FLT_MAX).
    A block whose scale underflows to zero has codes 7 or 15 for every non-zero element, and value zero.
    """

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return e4m3_encode_positive(amax * (g * constant(ONE_SIXTH, amax.device)))

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        inverse = torch.reciprocal(value * torch.reciprocal(g)).clamp_(max=FLT_MAX)
        return x * inverse.unsqueeze(-1)


@dataclass(frozen=True)
class NVFP4Fast(Profile):
    """FlashInfer's, vLLM's and TensorRT-LLM's default on a GPU, with the approximate reciprocal of a Hopper GPU.

    s = e4m3(g * (amax * rcp(6))); z = x * rcp(s * rcp(g)), 0 where s = 0. `rcp` is `rcp.approx.ftz.f32` as measured
    on sm_90 for all 2^23 mantissas; whether other architectures share that table has not been checked.
    """

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        sixth = approximate_reciprocal(constant(6.0, amax.device).reshape(1)).reshape(())
        return e4m3_encode_positive(g * (amax * sixth))

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        inverse = approximate_reciprocal(value * approximate_reciprocal(g))
        return x * torch.where(value == 0, 0.0, inverse).unsqueeze(-1)


@dataclass(frozen=True)
class NVFP4ModelOpt(Profile):
    """nvidia-modelopt 0.47: s = e4m3(clamp(amax / (6 s2), 2^-9, 448)), 1.0 for a zero block; z = x / (s s2).

    s2 is the decode scale amax/2688. Dequantised as q * (s * s2).
    """

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        ratio = amax / (constant(6.0, amax.device) * g)
        ratio = torch.where(ratio == 0, 1.0, ratio)
        return e4m3_encode_positive(ratio.clamp_(min=2.0**-9))

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return x / (value * g).unsqueeze(-1)

    def denormalise(self, q: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return q.mul_((value * g).unsqueeze(-1))


@dataclass(frozen=True)
class NVFP4TorchAO(Profile):
    """torchao 0.18: s = e4m3(clamp((amax / 6) / s2, 2^-6, 448)), so never subnormal; z = x * ((1 / s2) / s).

    s2 is the decode scale amax/2688. Dequantised as q * (s2 * s).
    """

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return e4m3_encode_positive(((amax / constant(6.0, amax.device)) / g).clamp_(min=2.0**-6))

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return x * (torch.reciprocal(g) / value).unsqueeze(-1)

    def denormalise(self, q: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return q.mul_((value * g).unsqueeze(-1))


@dataclass(frozen=True)
class NVFP4CompressedTensors(Profile):
    """compressed-tensors 0.20: s = e4m3(g * (amax / 6)), 0.125 where that is zero; z = x / (s / g).

    The library divides by six in the source's own dtype: a bf16 tensor and the same values in fp32 give other bytes.
    Dequantised as q * (s / g).
    """

    def block_scale(self, amax: Tensor, g: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        sixth = (amax.to(dtype) / constant(6.0, amax.device)).to(torch.float32)  # a GPU turns "/ 6.0" into a product
        scales = e4m3_encode_positive(g * sixth)
        return torch.where(scales == 0, 0x20, scales)

    def normalise(self, x: Tensor, scales: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return x / (value / g).unsqueeze(-1)

    def denormalise(self, q: Tensor, value: Tensor, g: Tensor | None) -> Tensor:
        return q.mul_((value / g).unsqueeze(-1))


@dataclass(frozen=True)
class FourOverSix(NVFP4Exact):
    """4over6 (arXiv 2512.02010): each block is quantised with its maximum at 6 and at 4, and the better one kept.

    s6 = e4m3((amax / 6) * g), s4 = e4m3(1.5 (amax / 6) g), z as nvfp4-exact; 4 is kept where its error is strictly
    smaller. The error is a sum over the block in order, in fp32, of (q s - x g)^2 (`metric` "mse") or |q s - x g|
    ("mae"): TransformerEngine's and FlashInfer's `err_use_fast_math`, SGLang's choice for weights it quantises.
    `scale_range` is 6 * 448 or 6 * 256; the E4M3 clamp stays at 448.
    """

    metric: str = "mse"

    def round_blocks(
        self, xb: Tensor, amax: Tensor, g: Tensor | None, dtype: torch.dtype, *, with_codes: bool, maybe_nan: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        to_six = (amax / constant(6.0, amax.device)) * g
        scaled = (xb * per_block(g)).nan_to_num_(nan=0.0)
        tried = []
        for scale in (to_six, to_six * 1.5):
            scales = e4m3_encode_positive(scale)
            value = self.scale_value(scales)
            z = self.normalise(xb, scales, value, g)
            q, codes = self.round(z, with_codes=with_codes, maybe_nan=maybe_nan)
            difference = q * value.unsqueeze(-1) - scaled
            terms = difference.abs() if self.metric == "mae" else difference * difference
            error = torch.zeros_like(amax)
            for i in range(self.block):
                error = error + terms[..., i]
            tried.append((q, codes, scales, value, error))
        six, four = tried
        pick = (four[4] < six[4]) & (amax != 0)
        wide = pick.unsqueeze(-1)
        codes = torch.where(wide, four[1], six[1]) if with_codes else None
        return (
            torch.where(wide, four[0], six[0]),
            codes,
            torch.where(pick, four[2], six[2]),
            torch.where(pick, four[3], six[3]),
        )
