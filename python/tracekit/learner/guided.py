"""torchtitan modules whose rounding and routing follow the sampler's, and the converter that swaps them in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter

from tracekit import numerics
from tracekit.learner.attention import PackedAttention
from tracekit.learner.guide import current, quantize_site

EXPERT_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


class BF16Linear(Linear):
    """A linear layer whose weight is read in BF16, as the sampler holds it; products accumulate in FP32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return F.linear(
            input, numerics.straight_through(weight, weight.detach().bfloat16().to(weight.dtype)), self.bias
        )


class BF16Embedding(Embedding):
    """An embedding whose table is read in BF16, as the sampler holds it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return numerics.straight_through(rows, rows.detach().bfloat16().to(rows.dtype))


class GuidedRouter(TokenChoiceTopKRouter):
    """Routing replay (R3): the sampler's expert ids, with gates computed afresh so that they carry gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        layer: int = -1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = config.layer

    def forward(self, x_BLD, expert_bias_E=None):
        guide = current()
        if guide is None or guide.routes is None:
            return super().forward(x_BLD, expert_bias_E)
        logits = self.gate(x_BLD).float()
        scores = torch.sigmoid(logits) if self.score_func == "sigmoid" else F.softmax(logits, dim=-1)
        ids = guide.routes[self.layer].view(*x_BLD.shape[:2], self.top_k)
        gates = scores.gather(-1, ids)
        if self.route_norm:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return gates * self.route_scale, ids, scores


class GuidedGroupedExperts(GroupedExperts):
    """Routed experts with low-bit weights and activations: W4A4 and W8A8 emulated by quantise-dequantise, or products
    of W8A8 codes (`quant.forward = "hardware"`), which round their input themselves.

    `refresh()` rounds the weights once; every forward until the next call uses that rounding, and `packed` holds the
    tensors to publish, so that the sampler receives what the learner trained with.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        layer: int = -1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = config.layer
        self.packed: dict[str, numerics.Quantized] = {}
        self._rounded: dict[str, torch.Tensor] = {}
        self._codes = False

    @torch.no_grad()
    def refresh(self, profile: str | None, *, power_of_two: bool = False, codes: bool = False) -> None:
        """Round the weights [E, out, in] under `profile`; gate and up projection share each expert's amax.

        With `power_of_two` global scales BF16 holds the rounded values exactly, for samplers that take them so.
        `codes` multiplies the codes themselves, of a profile that is W8A8."""
        self._codes = codes and profile is not None
        local = {name: _local(getattr(self, name)).detach() for name in EXPERT_WEIGHTS}
        if profile is None:
            self.packed = {}
            self._rounded = {name: w.bfloat16().to(w.dtype) for name, w in local.items()}
            return
        rule = {"profile": profile, "power_of_two": power_of_two}
        shared = numerics.expert_global_scale(local["w1_EFD"], local["w3_EFD"], **rule)
        down = numerics.expert_global_scale(local["w2_EDF"], **rule)
        scales = {"w1_EFD": shared, "w3_EFD": shared, "w2_EDF": down}
        self.packed, self._rounded = {}, {}
        for name, w in local.items():
            self.packed[name], values = round_weights(w, profile, scales[name], with_values=not self._codes)
            if values is not None:
                self._rounded[name] = values

    def _products(self, x: torch.Tensor, ends: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """`x` [R, in], sorted by expert, times each named weight: [R, out] each."""
        if self._codes:
            from tracekit.kernels import aligned_grouped  # brings Triton with it, which other runs do not need

            out = []
            for name in names:
                q, master = self.packed[name], _local(getattr(self, name))
                out.append(aligned_grouped(x, q.packed, q.scales, ends, q.profile, master=master, codes_on_cpu=True))
            return out
        weights = (numerics.straight_through(_local(getattr(self, n)), self._rounded[n]) for n in names)
        return [self._grouped_mm(A=x, B_t=w.transpose(-2, -1), offs=ends) for w in weights]

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """x [R, D] sorted by expert -> [R, D]."""
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate, up = self._products(x_RD, ends, "w1_EFD", "w3_EFD")
        hidden = quantize_site(f"layers.{self.layer}.moe_hidden", F.silu(gate) * up)
        return self._products(hidden, ends, "w2_EDF")[0]


class GuidedRoutedExperts(RoutedExperts):
    """Rounds the experts' input before dispatch: token by token, in token order, whatever the routing."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        layer: int = -1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = config.layer

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):
        batch, length, dim = x_BLD.shape
        top_k = topk_scores_BLK.size(-1)
        x_TD = quantize_site(f"layers.{self.layer}.moe_input", x_BLD.reshape(batch * length, dim))
        routed, counts, metadata = self.token_dispatcher.dispatch(
            x_TD,
            topk_scores_BLK.view(-1, top_k),
            topk_expert_ids_BLK.view(-1, top_k),
            num_local_tokens_per_expert_E,
        )
        with maybe_set_sparse_mesh():
            out = self.inner_experts(routed, counts)
        return self.token_dispatcher.combine(out, metadata, x_TD).view(batch, -1, dim)


class GuidedConverter(QuantizationConverter):
    """Swaps experts, router, attention and linears of a torchtitan model config for the guided ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config):
        """`model_config` with every target replaced; raises ValueError when one kind matches nothing."""

        def layer(fqn: str) -> int:
            return int(fqn.split(".")[1])

        counts = dict.fromkeys(("experts", "routers", "attentions"), 0)
        for fqn, node, parent, attr in list(model_config.traverse(RoutedExperts.Config)):
            swapped = derive(node, GuidedRoutedExperts.Config, layer=layer(fqn))
            swapped.inner_experts = derive(node.inner_experts, GuidedGroupedExperts.Config, layer=layer(fqn))
            setattr(parent, attr, swapped)
            counts["experts"] += 1
        for fqn, node, parent, attr in list(model_config.traverse(TokenChoiceTopKRouter.Config)):
            setattr(parent, attr, derive(node, GuidedRouter.Config, layer=layer(fqn)))
            counts["routers"] += 1
        for fqn, node, parent, attr in list(model_config.traverse((FlexAttention.Config, VarlenAttention.Config))):
            setattr(parent, attr, PackedAttention.Config(param_init=node.param_init, layer=layer(fqn)))
            counts["attentions"] += 1
        for stock, ours in ((Linear, BF16Linear), (Embedding, BF16Embedding)):
            for _, node, parent, attr in list(model_config.traverse(stock.Config)):
                if type(node) is stock.Config:
                    setattr(parent, attr, derive(node, ours.Config))
        empty = [kind for kind, count in counts.items() if not count]
        if empty:
            raise ValueError(f"the model has no {', '.join(empty)} that tracekit can guide")
        return model_config


def round_weights(
    w: torch.Tensor, profile: str, scale: torch.Tensor | None, *, with_values: bool, kernel: bool | None = None
) -> tuple[numerics.Quantized, torch.Tensor | None]:
    """Codes to publish of `w` [E, out, in] and the values they stand for, in w's dtype; both from one pass of a kernel
    where `kernel` (default: four-bit profiles on a GPU)."""
    info = numerics.profile_info(profile)
    if not (w.device.type == "cuda" and info.bits == 4 if kernel is None else kernel):
        q = numerics.quantize(w, info, global_scale=scale)
        return q, q.dequantize(w.dtype) if with_values else None
    from tracekit.kernels import quantize_pack

    packed, scales, _, values = quantize_pack(w, info, global_scale=scale, with_values=with_values)
    codes = numerics.unpack_codes(packed, w.shape[-1])
    return numerics.Quantized(codes, scales, scale if info.has_global else None, info, w.dtype), values


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
