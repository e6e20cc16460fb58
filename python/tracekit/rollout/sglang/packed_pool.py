"""SGLang's cache of K and V, held as four-bit codes and block scales: 9/32 of the bytes of BF16.

The rows of new tokens come from the plugin's rounding, codes and scales as they are recorded (`Arriving`): nothing is
rounded twice. Decode reads the pool where it is (`packed_attention`); prefill gets the values of the rows that it
attends to (`select`), never the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from tracekit.errors import EngineError
from tracekit.kernels.kv_rows import PROFILE, load_kv_rows, store_kv_rows
from tracekit.numerics import profile_info

BLOCK = profile_info(PROFILE).block


def packed_bytes(bf16_bytes: int) -> int:
    """Bytes a token takes here that takes `bf16_bytes` in BF16: half a byte a value, and one for `BLOCK` of them."""
    return bf16_bytes * (BLOCK + 2) // (4 * BLOCK)


class Arriving:
    """What was just rounded for one layer, between the plugin's hook and the pool."""

    def __init__(self) -> None:
        self._rows: tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def put(self, layer: int, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> None:
        """Codes u8 [T, H, D/2] and scales u8 [T, H, D/16] of layer `layer`."""
        self._rows = layer, k, v

    def take(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What was put for `layer`, once. Raises EngineError if that is not what was put last."""
        rows, self._rows = self._rows, None
        if rows is None or rows[0] != layer:
            raise EngineError(f"tracekit: K and V of layer {layer} reached the packed cache without being rounded")
        return rows[1:]


def pool_under(static_scales: Mapping[str, float]) -> type:
    """`pool_class` for an engine that rounds under `static_scales`."""
    pool = pool_class()
    pool.static_scales = static_scales
    return pool


@functools.cache
def pool_class() -> type:
    """SGLang's pool with packed buffers. (SGLang is imported here and not before.)"""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

    class PackedKVPool(MHATokenToKVPool):
        """`k_buffer`, `v_buffer`: codes u8 [slots, H, D/2] a layer; `k_scale_buffer`, `v_scale_buffer`: E4M3 bytes
        u8 [slots, H, D/16]."""

        arriving: Arriving
        selected: Tensor | None
        """Slots whose values `get_key_buffer` and `get_value_buffer` give; None for all (on a CPU)."""
        reader: object | None = None
        """The attention backend that knows what those two give; they refuse others."""
        static_scales: Mapping[str, float]

        def _create_buffers(self) -> None:
            todo = 'use kv_pool = "bf16"'
            if self.post_capture_active:
                raise EngineError(
                    f"tracekit: no packed cache sized after graph capture\n"
                    f"unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, or {todo}"
                )
            if getattr(self, "use_hnd", False):
                raise EngineError(
                    f"tracekit: no packed cache of heads, then tokens\nunset SGLANG_USE_HND_KVCACHE, or {todo}"
                )
            if self.is_quantized_kv_cache or self.dtype != torch.bfloat16:
                raise EngineError(f"tracekit: the packed cache takes the place of a BF16 one, not {self.dtype}\n{todo}")
            if self.head_dim % BLOCK or self.head_num * self.head_dim % (4 * BLOCK):
                raise EngineError(
                    f"tracekit: no packed cache of {self.head_num} heads of {self.head_dim} values\n{todo}"
                )
            rows, layers = self.size + self.page_size, range(self.layer_num)
            self.store_dtype = torch.uint8
            self.dq_k_buffer = self.dq_v_buffer = None

            def buffers(width: int) -> list[Tensor]:
                shape = (rows, self.head_num, width)
                return [torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in layers]

            with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
                self.k_buffer, self.k_scale_buffer = buffers(self.head_dim // 2), buffers(self.head_dim // BLOCK)
                self.v_buffer, self.v_scale_buffer = buffers(self.v_head_dim // 2), buffers(self.v_head_dim // BLOCK)
            self.arriving = Arriving()
            self.selected = torch.zeros(0, dtype=torch.int64, device=self.device)
            self._kv_buffer_descs = self._build_kv_buffer_descs()
            self._init_data_ptrs_and_strides()

        def packed(self, layer_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """K's codes and scales, then V's."""
            i = layer_id - self.start_layer
            return self.k_buffer[i], self.k_scale_buffer[i], self.v_buffer[i], self.v_scale_buffer[i]

        def global_scales(self, layer_id: int) -> tuple[float, float]:
            """Encode scales of K and of V."""
            return self.static_scales[f"layers.{layer_id}.k"], self.static_scales[f"layers.{layer_id}.v"]

        def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, *_args, **_named) -> None:
            slots, _, _ = unwrap_write_loc(loc_info)
            k, v = self.arriving.take(layer.layer_id)
            store_kv_rows(k, v, slots, self.packed(layer.layer_id))

        def select(self, slots: Tensor | None) -> None:
            """Have the next reads give the values of rows `slots`, in their order."""
            self.selected = slots

        def _values(self, layer_id: int, first: int) -> Tensor:
            if self.reader is None:
                raise EngineError("tracekit: the packed cache is read by tracekit's attention only; see docs/sglang.md")
            codes, scales = self.packed(layer_id)[first : first + 2]
            slots = self.selected
            if slots is None:
                slots = torch.arange(len(codes), device=codes.device)
            return load_kv_rows(codes, scales, slots, global_scale=self.global_scales(layer_id)[first // 2])

        def _get_key_buffer(self, layer_id: int) -> Tensor:
            return self._values(layer_id, 0)

        def _get_value_buffer(self, layer_id: int) -> Tensor:
            return self._values(layer_id, 2)

    return PackedKVPool
