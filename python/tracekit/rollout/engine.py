"""The in-process engine: prefill, then one token at a time over an FP4 cache, with FP4 experts.

It computes as a serving engine does and not as the learner does: activations are rounded to BF16 after every
operator, products accumulate in FP32, prompts are prefilled once for their group, and each decode step attends over
the codes and scales that the cache holds. It needs nothing but torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tracekit import numerics
from tracekit.config.schema import ModelConfig, QuantConfig
from tracekit.errors import EngineError
from tracekit.rollout.cache import Capture, KVCache, SiteBuffer
from tracekit.rollout.protocol import PublishedWeights, Rollouts

NORM_EPS = 1e-6


@dataclass(kw_only=True, slots=True)
class _Layer:
    """Weights of one layer, transposed for `x @ w`; experts are dequantised once, when they arrive."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    wo: torch.Tensor
    ffn_norm: torch.Tensor
    gate: torch.Tensor
    w13: torch.Tensor
    """[E, dim, 2 hidden]"""
    w2: torch.Tensor
    """[E, hidden, dim]"""


class InProcessEngine:
    """Samples from a Qwen3-style mixture of experts on the device of the weights it is given."""

    def __init__(
        self,
        model: ModelConfig,
        quant: QuantConfig,
        *,
        eos_id: int,
        pad_id: int,
        static_scales: dict[str, torch.Tensor] | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`static_scales`: encode scale of each site; None takes one from each token. `dtype` float32 leaves out the
        BF16 rounding of activations, which tests use to compare with the learner."""
        self.model, self.quant = model, quant
        self.eos_id, self.pad_id = eos_id, pad_id
        self.static_scales = static_scales
        self.dtype = dtype
        self.version = -1
        self.capture: Capture | None = None
        self._layers: list[_Layer] = []
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self._experts_profile = None if quant.experts == "none" else quant.experts
        self._kv_profile = None if quant.kv == "none" else quant.kv

    def load(self, weights: PublishedWeights) -> None:
        """Serve `weights` from now on. Raises EngineError when a tensor is missing."""

        def dense(name: str) -> torch.Tensor:
            if name not in weights.dense:
                raise EngineError(f"weights of version {weights.version} lack {name}: publish the whole model")
            return weights.dense[name].float()

        def experts(name: str) -> torch.Tensor:
            w = weights.experts[name]
            return w.dequantize(torch.float32) if isinstance(w, numerics.Quantized) else w.float()

        layers = []
        for i in range(self.model.n_layers):
            at, moe = f"layers.{i}.attention", f"layers.{i}.moe"
            inner = f"{moe}.routed_experts.inner_experts"
            up = torch.cat([experts(f"{inner}.w1_EFD"), experts(f"{inner}.w3_EFD")], dim=1)
            layers.append(
                _Layer(
                    attention_norm=dense(f"layers.{i}.attention_norm.weight"),
                    qkv=torch.cat([dense(f"{at}.qkv_linear.w{n}.weight") for n in "qkv"]).T.contiguous(),
                    q_norm=dense(f"{at}.q_norm.weight"),
                    k_norm=dense(f"{at}.k_norm.weight"),
                    wo=dense(f"{at}.wo.weight").T.contiguous(),
                    ffn_norm=dense(f"layers.{i}.ffn_norm.weight"),
                    gate=dense(f"{moe}.router.gate.weight").T.contiguous(),
                    w13=up.transpose(1, 2).contiguous(),
                    w2=experts(f"{inner}.w2_EDF").transpose(1, 2).contiguous(),
                )
            )
        self._embedding = dense("tok_embeddings.weight")
        self._norm = dense("norm.weight")
        self._head = dense("lm_head.weight").T.contiguous()
        self._layers = layers
        self._rope = self._rope_table(self._embedding.device)
        self.version = weights.version

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int,
        temperature: float,
        max_response_len: int,
        seed: int,
        topk: int = 0,
    ) -> Rollouts:
        """As `protocol.Engine.generate`. Fills `self.capture` when it is set."""
        if not self._layers:
            raise EngineError("the engine has no weights yet: call load() before generate()")
        m = self.model
        device = self._embedding.device
        rng = torch.Generator(device=device).manual_seed(seed)
        n_prompts = len(prompts)
        n = n_prompts * group_size
        prompt_len = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(prompt_len.max())
        total = longest + max_response_len
        if total > m.max_seq_len:
            raise EngineError(
                f"prompt of {longest} tokens plus {max_response_len} exceeds model.max_seq_len={m.max_seq_len}"
            )
        padded = torch.full((n_prompts, longest), self.pad_id, dtype=torch.int64, device=device)
        for i, p in enumerate(prompts):
            padded[i, : len(p)] = torch.tensor(p, device=device)

        cache = KVCache(m, self._kv_profile, rows=n_prompts, length=longest, device=device)
        inputs = self._site_buffers(n_prompts, longest, device)
        routes = torch.zeros(n_prompts, longest, m.n_layers, m.top_k, dtype=torch.uint8, device=device)
        logits = self._prefill(padded, prompt_len, cache, inputs, routes)

        # Siblings start from their prompt's cache; what the prompt recorded stays with the prompt.
        cache = cache.expand(group_size, total)
        prompt_inputs, prompt_routes = inputs, routes
        inputs = self._site_buffers(n, max_response_len, device)
        tokens = torch.full((n, total), self.pad_id, dtype=torch.int64, device=device)
        tokens[:, :longest] = padded.repeat_interleave(group_size, 0)
        all_routes = torch.zeros(n, total, m.n_layers, m.top_k, dtype=torch.uint8, device=device)
        all_routes[:, :longest] = prompt_routes.repeat_interleave(group_size, 0)
        start = prompt_len.repeat_interleave(group_size)
        logits = logits.repeat_interleave(group_size, 0)
        logp = torch.zeros(n, max_response_len, device=device)
        k = min(topk, logits.shape[-1])
        top_logp = torch.full((n, max_response_len, k), float("-inf"), device=device)
        top_ids = torch.zeros(n, max_response_len, k, dtype=torch.int32, device=device)
        length = torch.zeros(n, dtype=torch.int64, device=device)
        finished = torch.zeros(n, dtype=torch.bool, device=device)
        rows = torch.arange(n, device=device)
        for step in range(max_response_len):
            chosen, chosen_logp, every = _sample(logits, temperature, rng)
            tokens[rows, start[rows] + step] = chosen
            logp[rows, step] = chosen_logp
            if k:
                best = every.topk(k, dim=-1)
                top_logp[rows, step], top_ids[rows, step] = best.values, best.indices.int()
            length[rows] += 1
            ended = chosen == self.eos_id
            finished[rows] = ended
            keep = ~ended
            rows, chosen = rows[keep], chosen[keep]
            if step + 1 == max_response_len or rows.numel() == 0:
                break
            logits = self._decode(chosen, rows, start[rows] + step, step, cache, inputs, all_routes)

        if self.capture is not None:
            self.capture.take(
                prompt_len=prompt_len,
                response_len=length,
                prompt_inputs=prompt_inputs,
                inputs=inputs,
                cache=cache,
                group_size=group_size,
            )
        return Rollouts(
            tokens=tokens.cpu().numpy(),
            prompt_len=start.cpu().numpy(),
            response_len=length.cpu().numpy(),
            logp_mu=logp.cpu().numpy(),
            routes=all_routes.cpu().numpy(),
            finished=finished.cpu().numpy(),
            group=np.repeat(np.arange(n_prompts), group_size),
            version=self.version,
            topk_ids=top_ids.cpu().numpy() if k else None,
            topk_logp=top_logp.cpu().numpy() if k else None,
        )

    # -- forward passes

    def _prefill(self, tokens, prompt_len, cache, inputs, routes) -> torch.Tensor:
        """Prompts [P, S], right-padded -> logits [P, V] after each prompt's last token."""
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(rows, length)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None]
        x = self._embedding[tokens].view(rows * length, -1)
        where = (torch.arange(rows, device=tokens.device).repeat_interleave(length), positions.reshape(-1))
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, positions.reshape(-1))
            cache.write(i, where, self._quantize_kv(i, "k", k), self._quantize_kv(i, "v", v))
            keys, values = cache.read(i)
            out = self._attend(q.view(rows, length, *q.shape[1:]), keys, values, mask)
            x = self._finish_layer(i, layer, x, out.reshape(rows * length, -1), inputs, where, routes, where)
        last = x.view(rows, length, -1)[torch.arange(rows, device=tokens.device), prompt_len - 1]
        return self._logits(last)

    def _decode(self, chosen, rows, positions, step, cache, inputs, routes) -> torch.Tensor:
        """One token for each of `rows`, at `positions` [A] -> logits [A, V]."""
        x = self._embedding[chosen]
        where = (rows, positions)
        slot = (rows, torch.full_like(rows, step))
        span = int(positions.max()) + 1
        mask = torch.arange(span, device=rows.device)[None, None] <= positions[:, None, None]
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, positions)
            cache.write(i, where, self._quantize_kv(i, "k", k), self._quantize_kv(i, "v", v))
            keys, values = cache.read(i, rows, span)
            out = self._attend(q[:, None], keys, values, mask)
            x = self._finish_layer(i, layer, x, out.reshape(len(rows), -1), inputs, slot, routes, where)
        return self._logits(x)

    def _qkv(self, layer: _Layer, x, positions):
        m = self.model
        h = self._act(_rms_norm(x, layer.attention_norm))
        q, k, v = self._act(h @ layer.qkv).split([m.n_heads * m.head_dim] + [m.n_kv_heads * m.head_dim] * 2, dim=-1)
        q = self._act(_rms_norm(q.unflatten(-1, (-1, m.head_dim)), layer.q_norm))
        k = self._act(_rms_norm(k.unflatten(-1, (-1, m.head_dim)), layer.k_norm))
        cos, sin = (table[positions][:, None] for table in self._rope)
        q, k = (self._act(t * cos + _rotate_half(t) * sin) for t in (q, k))
        return q, k, v.unflatten(-1, (-1, m.head_dim))

    def _attend(self, q, keys, values, mask):
        """q [B, S, N, H], keys and values [B, T, Hkv, H], mask bool [1 or B, S, T] -> [B, S, N, H]."""
        b, s, n, h = q.shape
        groups = n // keys.shape[2]
        qg = q.view(b, s, keys.shape[2], groups, h).permute(0, 2, 3, 1, 4).reshape(b, keys.shape[2], groups * s, h)
        scores = (qg @ keys.permute(0, 2, 3, 1)) * h**-0.5
        scores = scores.view(b, -1, groups, s, keys.shape[1]).masked_fill(~mask[:, None, None], float("-inf"))
        weights = scores.softmax(-1).view(b, -1, groups * s, keys.shape[1])
        out = (weights @ values.permute(0, 2, 1, 3)).view(b, -1, groups, s, h)
        return self._act(out.permute(0, 3, 1, 2, 4).reshape(b, s, n, h))

    def _finish_layer(self, i, layer: _Layer, x, attention_out, inputs, slot, routes, where):
        x = self._act(x + self._act(attention_out @ layer.wo))
        h = self._act(_rms_norm(x, layer.ffn_norm))
        gates, ids = torch.topk((h @ layer.gate).softmax(-1), self.model.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        routes[where[0], where[1], i] = ids.to(torch.uint8)
        if self._experts_profile:
            site = f"layers.{i}.moe_input"
            scale = self._scale(site, h, self._experts_profile)
            h, codes, scales = numerics.quantize_dequantize(h, self._experts_profile, global_scale=scale)
            if inputs is not None:
                inputs[i].write(slot, codes, scales, scale if self.static_scales is None else None)
        return self._act(x + self._experts(i, layer, h, gates, ids))

    def _experts(self, i, layer: _Layer, h, gates, ids):
        """Two-layer SwiGLU of each token's `top_k` experts, weighted by `gates`; rows sorted by expert."""
        top_k = ids.shape[1]
        order = torch.argsort(ids.reshape(-1), stable=True)
        token = order // top_k
        counts = torch.bincount(ids.reshape(-1), minlength=self.model.n_experts).tolist()
        rows = h[token]
        up = torch.cat([part @ w for part, w in zip(rows.split(counts), layer.w13, strict=True)])
        gate, value = self._act(up).chunk(2, dim=-1)
        hidden = self._act(F.silu(gate) * value)
        if self._experts_profile:
            site = f"layers.{i}.moe_hidden"
            scale = self._scale(site, hidden, self._experts_profile)
            hidden = numerics.quantize_dequantize(hidden, self._experts_profile, global_scale=scale)[0]
        down = self._act(torch.cat([part @ w for part, w in zip(hidden.split(counts), layer.w2, strict=True)]))
        out = torch.zeros_like(h)
        return self._act(out.index_add_(0, token, down * gates.reshape(-1)[order][:, None]))

    def _logits(self, x) -> torch.Tensor:
        return self._act(_rms_norm(x, self._norm)) @ self._head

    # -- numerics

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        """Round an operator's output to the engine's activation type; values stay in FP32 storage."""
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def _scale(self, site: str, x: torch.Tensor, profile: str) -> torch.Tensor | None:
        if not numerics.profile_info(profile).has_global:
            return None
        if self.static_scales is not None:
            return self.static_scales[site]
        return numerics.global_scale_for(numerics.absolute_maximum(x, tuple(range(1, x.ndim)), keepdim=True))

    def _quantize_kv(self, i: int, name: str, x: torch.Tensor):
        """x [T, Hkv, H] -> (values, codes, scales, token scale); the last three None where the cache is not FP4."""
        if not self._kv_profile:
            return x, None, None, None
        scale = self._scale(f"layers.{i}.{name}", x, self._kv_profile)
        values, codes, scales = numerics.quantize_dequantize(x, self._kv_profile, global_scale=scale)
        return values, codes, scales, scale if self.static_scales is None else None

    def _site_buffers(self, rows: int, length: int, device) -> list[SiteBuffer] | None:
        """What keeps the experts' inputs; None where they are not rounded, or to eight bits: those leave no record."""
        if not self._experts_profile:
            return None
        info = numerics.profile_info(self._experts_profile)
        if info.bits == 8:
            return None
        token_scale = self.static_scales is None and info.has_global
        return [
            SiteBuffer(rows, length, 1, self.model.dim, info.block, token_scale, device)
            for _ in range(self.model.n_layers)
        ]

    def _rope_table(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.model
        inv = 1.0 / (m.rope_theta ** (torch.arange(0, m.head_dim, 2).float() / m.head_dim))
        angle = torch.outer(torch.arange(m.max_seq_len).float(), inv).to(device)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def _sample(
    logits: torch.Tensor, temperature: float, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [A, V] -> token [A], its log-prob [A] and all of them [A, V], under logits / temperature."""
    if temperature == 0:
        logp = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
    else:
        logp = (logits / temperature).log_softmax(-1)
        chosen = torch.multinomial(logp.exp(), 1, generator=rng)[:, 0]
    return chosen, logp.gather(-1, chosen[:, None])[:, 0], logp
