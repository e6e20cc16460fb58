"""Attention over packed rows: groups share a row, siblings share a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from tracekit.learner.guide import quantize_site


def packed_mask(group_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Who sees whom in packed rows. [B, L] int64 each -> bool [B, 1, L, L].

    A token sees earlier tokens of its group that belong to the shared prompt (segment -1) or to its own segment.
    Padding (group -1) sees itself only.
    """
    length = group_ids.shape[1]
    group = group_ids[:, :, None] == group_ids[:, None, :]
    segment = (segment_ids[:, None, :] < 0) | (segment_ids[:, :, None] == segment_ids[:, None, :])
    causal = torch.ones(length, length, dtype=torch.bool, device=group_ids.device).tril()
    eye = torch.eye(length, dtype=torch.bool, device=group_ids.device)
    return ((group & segment & causal & (group_ids >= 0)[:, :, None]) | eye)[:, None]


class PackedAttention(VarlenAttention):
    """Scaled dot-product attention under a mask from `packed_mask`, with K and V rounded as the cache rounds them.

    Runs on every device: FlexAttention has no backward on a CPU and the varlen kernels are CUDA's. K arrives after
    RoPE, which is where the sampler writes its cache.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        layer: int = -1

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # VarlenAttention's own would ask for a flash-attention package on Hopper
        self.layer = config.layer

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_):
        """q [B, L, N, H], k and v [B, L, Hkv, H], `attention_masks` bool [B, 1, L, L] -> [B, L, N, H]."""
        batch, length = k_BLNH.shape[:2]
        k, v = (
            quantize_site(f"layers.{self.layer}.{name}", x.flatten(0, 1)).view(batch, length, *x.shape[2:])
            for name, x in (("k", k_BLNH), ("v", v_BLNH))
        )
        out = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)
