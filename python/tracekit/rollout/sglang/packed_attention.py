"""Attention backends over the packed cache, in the places of SGLang's `triton` and `torch_native`.

Decode runs `fp4_decode_attention` on the engine's own table of slots: nothing is prepared for it, in a CUDA graph or
outside, and one graph serves all lengths. Prefill is SGLang's own kernel, over the new tokens' rounded K and V and the
values of the cached prefix's rows.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tracekit.errors import EngineError
from tracekit.kernels import fp4_decode_attention

BACKENDS = ("triton", "torch_native")
BARRIER = "SGLANG_FORCE_COARSE_WAR_BARRIER"
"""SGLang lets its scheduler write to the table of slots as soon as a decode graph's metadata are prepared: its own
backends have copied what they need by then. Decode here reads the table itself, in every layer, so the scheduler's
writes wait for the whole forward, as they do for every forward without a graph."""


def replace_backends() -> None:
    """Register the packed backends under SGLang's names; what else asks for these names need not know."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS.update({"triton": _triton, "torch_native": _native})


def hold_table() -> None:
    """Have this scheduler leave the table of slots alone until a forward has read it; `BARRIER` = 0 overrules."""
    os.environ.setdefault(BARRIER, "1")


def refuse_other_readers(runner: object) -> None:
    """Raise EngineError if the engine chose attention that cannot read the packed cache."""
    if runner.token_to_kv_pool.reader is None:
        raise EngineError(
            f"tracekit: {type(runner.attn_backend).__name__} cannot read the packed cache\n"
            f'start the engine with --attention-backend {BACKENDS[0]}, or use kv_pool = "bf16"'
        )


def decode(backend: object, q: Tensor, layer: object, batch: object, longest: int) -> Tensor:
    """Attention of one query a request over the pool, [B, Hq * D]."""
    pool, table = backend.token_to_kv_pool, backend.req_to_token_pool.req_to_token
    k_global, v_global = pool.global_scales(layer.layer_id)
    out = fp4_decode_attention(
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        *pool.packed(layer.layer_id),
        table,
        batch.seq_lens,
        page_size=pool.page_size,
        softmax_scale=layer.scaling,
        k_global_scale=k_global,
        v_global_scale=v_global,
        max_length=longest,
        rows=batch.req_pool_indices,
    )
    return out.reshape(len(out), -1)


class _Packed:
    """What the backends share, before SGLang's own class. Layers have K and V of their own: prefill would look for
    another layer's among selected rows."""

    def __init__(self, runner: object, *rest, **named) -> None:
        runner.token_to_kv_pool.reader = self
        self._longest = runner.model_config.context_len
        super().__init__(runner, *rest, **named)

    def forward_extend(self, q, k, v, layer, forward_batch, *rest, **named):
        _refuse_shared(layer, k)
        return super().forward_extend(q, k, v, layer, forward_batch, *rest, **named)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **rest):
        _store(self, k, v, layer, forward_batch, save_kv_cache, rest)
        return decode(self, q, layer, forward_batch, self._longest)


def _refuse_shared(layer: object, k: Tensor | None) -> None:
    if k is None:
        raise EngineError(
            f"tracekit: layer {layer.layer_id} attends to another layer's K and V; the packed cache gives a layer its "
            'own\nuse kv_pool = "bf16"'
        )


def _store(backend: object, k: Tensor, v: Tensor, layer: object, batch: object, save: bool, rest: dict) -> None:
    _refuse_shared(layer, k)
    unknown = [name for name, value in rest.items() if value is not None]
    if unknown or not save:
        raise EngineError(f"tracekit: layer {layer.layer_id} wants {unknown or ['save_kv_cache=False']} of attention")
    backend.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)


def _native(runner: object) -> object:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class PackedNative(_Packed, TorchNativeAttnBackend):
        """On a CPU: prefill reads the whole pool's values, as SGLang's own reads the whole pool."""

        def __init__(self, runner: object) -> None:
            super().__init__(runner)
            self.token_to_kv_pool.select(None)

    return PackedNative(runner)


def _triton(runner: object) -> object:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class PackedTriton(_Packed, TritonAttnBackend):
        """Metadata for prefill only; its prefix rows are counted from 0, as `select` has them."""

        def __init__(self, runner: object, *rest, **named) -> None:
            super().__init__(runner, *rest, **named)
            self.page_size = 1  # of the rows that prefill sees; the pool has its own

        def init_forward_metadata(self, forward_batch) -> None:
            if forward_batch.forward_mode.is_decode_or_idle():
                return
            super().init_forward_metadata(forward_batch)
            meta = self.forward_metadata
            if forward_batch.extend_prefix_lens_cpu is None:  # allocated for the longest; wait for what there is
                meta.kv_indices = meta.kv_indices[: int(meta.kv_indptr[-1])]
            self.token_to_kv_pool.select(meta.kv_indices)
            meta.kv_indices = torch.arange(len(meta.kv_indices), device=meta.kv_indices.device)

        def init_cuda_graph_state(self, *_args, **_named) -> None:
            pass

        def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
            if not forward_batch.forward_mode.is_decode_or_idle():
                raise EngineError("tracekit: the packed cache needs cuda_graph_backend_prefill = disabled")

    return PackedTriton(runner)
