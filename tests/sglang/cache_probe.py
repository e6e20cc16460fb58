"""A plugin of these tests beside tracekit's: what the cache of K and V holds of a request that has just finished."""

import os
from pathlib import Path

import numpy as np
import torch

FOLDER = "TRACEKIT_TEST_CACHE"
"""Environment variable: where `<request id>.npz` go, arrays `layers.N.k` and `layers.N.v` [tokens, heads, width]."""
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: tracekit-cache-probe\nVersion: 0\n",
    "entry_points.txt": "[sglang.srt.plugins]\ntracekit-cache-probe = cache_probe:register\n",
}


def install(site: Path) -> None:
    """Make `site` a folder of packages that holds this plugin."""
    folder = site / "tracekit_cache_probe-0.dist-info"
    folder.mkdir(parents=True)
    for name, text in METADATA.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*METADATA, "RECORD")))


def register() -> None:
    """Entry point `sglang.srt.plugins`."""
    if FOLDER not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tracekit.rollout.sglang.plugin import RESULTS

    def around(collect, processor, req):
        save(processor, req)
        collect(processor, req)

    HookRegistry.register(f"{RESULTS}._maybe_collect_routed_experts", around, HookType.AROUND)


def save(processor, req) -> None:
    """Write the rows of `req`'s tokens, which still hold their slots."""
    count = len(req.origin_input_ids) + len(req.output_ids_through_stop) - 1
    number = req.kv.req_pool_idx if hasattr(getattr(req, "kv", None), "req_pool_idx") else req.req_pool_idx
    if "/" not in req.rid or number is None or not len(req.output_ids_through_stop):
        return
    slots = processor.req_to_token_pool.req_to_token[number][:count].long()
    pool = processor.token_to_kv_pool_allocator.get_kvcache()
    arrays = {}
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        for name, values in zip("kv", of_layer(pool, layer, slots), strict=True):
            arrays[f"layers.{layer}.{name}"] = values.float().cpu().numpy()
    path = Path(os.environ[FOLDER]) / f"{req.rid}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def of_layer(pool, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `slots`, in the cache's own numbers."""
    if not hasattr(pool, "packed"):
        return pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]
    from tracekit.kernels.kv_rows import load_kv_rows

    codes_k, scales_k, codes_v, scales_v = pool.packed(layer)
    g_k, g_v = pool.global_scales(layer)
    return (
        load_kv_rows(codes_k, scales_k, slots, global_scale=g_k),
        load_kv_rows(codes_v, scales_v, slots, global_scale=g_v),
    )
