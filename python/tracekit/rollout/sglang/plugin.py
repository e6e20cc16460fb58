"""The plugin: hooks in SGLang's own registry, all of them or none.

Entry point `sglang.srt.plugins`; SGLang calls `register` in each of its processes, before the engine is built. Without
settings in the environment it does nothing. SGLang only logs a hook that does not apply, so the first hook that runs
checks that the others are in place and stops the engine otherwise.

| hook | why |
|---|---|
| `FusedMoE.run_moe_core`, around | the experts' input is rounded and recorded, the router's is not |
| `quantize_hidden_states_fp4`, after (`native`) | experts that round their own input: their codes are recorded |
| `SiluAndMul.forward_native` or the runners' `silu_and_mul`, after | the second GEMM's input is rounded |
| `RadixAttention.forward`, before | K and V are rounded before attention and cache see them |
| `enable_fused_set_kv_buffer`, replaced | on CUDA, models would write K and V to the cache with RoPE, unrounded |
| `_build_mha_kv_pool`, `_compute_cell_size`, around | the packed cache is built, and its size known (`kv_pool`) |
| `ModelRunner.init_attention_backends`, after | the packed cache has a reader (`kv_pool`) |
| `ModelRunner.init_routed_experts_capturer`, after | buffers exist before any CUDA graph is captured |
| `ModelRunner.forward`, after | a forward's rows travel on the engine's own copy stream |
| `_maybe_collect_routed_experts`, around | a finished request's rows are gathered while it holds its slots |
| `schedule_batch.release_req`, before | rows of a request that is pushed out are kept: they go with its old tokens |
| `record_weight_version_after_update`, after | rows carry the policy version that computed them |
| `update_weights_from_*`, before | a forward that still runs on the GPU ends with the weights that it began with |
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from tracekit.errors import EngineError
from tracekit.rollout.sglang import native
from tracekit.rollout.sglang.capture import Rounder
from tracekit.rollout.sglang.handover import Finished, Handover, seal_at_end
from tracekit.rollout.sglang.native import NativeCodes
from tracekit.rollout.sglang.platform import use_plain_memory
from tracekit.rollout.sglang.refusals import refuse_cut_blocks, refuse_packed, refuse_unsupported
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.stopwatch import Stopwatch
from tracekit.rollout.sglang.store import Found, SlotStore

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class Plugin:
    """What the hooks share in one scheduler process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rounder: Rounder | None = None
        self.store: SlotStore | None = None
        self.handover: Handover | None = None
        self.targets: list[str] = []
        self.version = 0
        self.native: NativeCodes | None = None
        self.pool: object | None = None
        """The cache, if it is packed."""
        self._inside: int | None = None
        """Layer whose experts run now."""
        self._hidden = False
        """Whether the experts that run now have shown their second GEMM's input."""
        self._kept: WeakKeyDictionary[object, Found] = WeakKeyDictionary()
        """Rows of requests that were pushed out. One that is aborted while it waits reaches no hook: the engine just
        forgets it, and so must this."""

    # -- start

    def start(self, runner: object) -> None:
        """Allocate, once the engine knows its sizes. Raises EngineError for what is not supported."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        missing = [target for target in self.targets if target not in HookRegistry._patched]
        if missing:
            raise EngineError(f"tracekit: this SGLang has no {missing[0]}; see docs/sglang.md for the versions")
        args = runner.server_args
        refuse_unsupported(args)
        refuse_cut_blocks(self.settings, runner.model_config.hf_config, args)
        if self.settings.kv_pool == "packed":
            from tracekit.rollout.sglang.packed_attention import hold_table

            refuse_packed(self.settings, runner)
            hold_table()
            self.pool = runner.token_to_kv_pool
        self.settings = self.settings.share(*_rank(runner))
        tokens = max(args.max_prefill_tokens or 0, args.chunked_prefill_size or 0, runner.max_running_requests or 0, 1)
        slots = runner.max_total_num_tokens + (runner.page_size or 1) + tokens
        if hasattr(runner, "kv_index_translator"):
            slots = max(slots, runner.kv_index_translator.capture_token_capacity(runner.max_token_pool_size))
        self.rounder = Rounder(self.settings, tokens, torch.device(runner.device))
        if self.settings.experts is not None:
            self._see_native(runner.model_config.quantization, getattr(args, "moe_runner_backend", None))
        if self.settings.sites:
            self.store = SlotStore(slots, sum(column.bytes for column in self.rounder.columns.values()))
            self.handover = Handover(self.settings, self.rounder.columns)
            seal_at_end(self.handover)

    def _see_native(self, quantization: str | None, backend: str | None) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if native.rounds_itself(quantization, backend):
            self.native = NativeCodes(self.settings, self.rounder)
            HookRegistry.register(native.TARGET, self.native.after, HookType.AFTER)
            HookRegistry.apply_hooks()
            if native.TARGET not in HookRegistry._patched:
                raise EngineError(f"tracekit: this SGLang has no {native.TARGET}; see docs/sglang.md for the versions")

    def updated(self, weight_version: str | None) -> None:
        """Weights have come, from tensors, a disk or another process; parts of an update carry no version."""
        if weight_version is not None:
            self.version = int(weight_version) if weight_version.isdecimal() else self.version + 1

    # -- inside a forward

    def experts(self, run, layer: object, dispatch_output: object):
        """Around `FusedMoE.run_moe_core`."""
        profile = self.settings.experts
        if profile is None or self.rounder is None:
            return run(layer, dispatch_output)
        if getattr(layer, "num_fused_shared_experts", 0):
            raise EngineError(
                f"tracekit: layer {layer.layer_id} runs shared experts as routed ones: they would be rounded, and "
                "recorded among the routes\nstart the engine with --disable-shared-experts-fusion"
            )
        if self.native is not None:
            return self.native.around(run, layer, dispatch_output)
        x = self.rounder.round(f"layers.{layer.layer_id}.moe_input", dispatch_output.hidden_states, profile)
        self._inside, self._hidden = layer.layer_id, False
        try:
            out = run(layer, dispatch_output._replace(hidden_states=x))
        finally:
            self._inside = None
        # a rank with a part of the experts may have none of these tokens
        if not self._hidden and len(x) and (getattr(layer, "moe_ep_size", 1) == 1 or x.is_cuda):
            raise EngineError(
                f"tracekit: the experts of layer {layer.layer_id} hid the input of their second GEMM: it was not "
                "rounded\nstart the engine with --moe-runner-backend triton, and without --enable-torch-compile, "
                "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED and experts of another activation than silu"
            )
        return out

    def hidden(self, out: torch.Tensor) -> torch.Tensor:
        """The rounded second GEMM's input, for calls inside the experts; `out` itself elsewhere."""
        if self._inside is None:
            return out
        self._hidden = True
        if len(out) == 0:
            return out
        return self.rounder.round(f"layers.{self._inside}.moe_hidden", out, self.settings.experts)

    def attention(self, layer: object, q, k, v, *rest, **named):
        """Before `RadixAttention.forward`: its arguments, with K and V rounded."""
        profile = self.settings.kv
        if profile is not None and self.rounder is not None and k is not None:
            if not named.get("save_kv_cache", rest[1] if len(rest) > 1 else True):
                raise EngineError(
                    f"tracekit: layer {layer.layer_id} writes K and V to the cache before attention, unrounded\n"
                    'this model stores them itself: set quant.kv = "none"'
                )
            (k, *k_rows), (v, *v_rows) = (
                self.rounder.round_to_codes(f"layers.{layer.layer_id}.{name}", x.reshape(-1, heads, width), profile)
                for name, x, heads, width in (
                    ("k", k, layer.tp_k_head_num, layer.qk_head_dim),
                    ("v", v, layer.tp_v_head_num, layer.v_head_dim),
                )
            )
            if self.pool is not None:
                self.pool.arriving.put(layer.layer_id, tuple(k_rows), tuple(v_rows))
        return (layer, q, k, v, *rest), named

    # -- after a forward

    def forward(self, out: object, runner: object, batch: object) -> object:
        """Lets the rows of this forward ride with the engine's own output."""
        if runner.is_draft_worker:
            return out
        own_routes(out.routed_experts_output)
        if self.store is None:
            return out
        slots = getattr(batch, "out_cache_loc_virtual", None)
        slots = batch.out_cache_loc if slots is None else slots
        if self.rounder.unseen and len(slots):
            raise EngineError(
                f"tracekit: a forward of this model does not come to {min(self.rounder.unseen)}: its records would be "
                "zeros\nleave the site out of the settings, or use a model that has it"
            )
        ride = Ride(self, out.routed_experts_output, slots.clone(), self.rounder.take(len(slots)))
        from sglang.srt.runtime_context import get_schedule

        if get_schedule().disable_overlap_schedule:
            ride.finalize()
        else:
            out.routed_experts_output = ride
        return out

    def arrived(self, slots: torch.Tensor, rows: torch.Tensor, version: int) -> None:
        """Rows of a forward are on the host."""
        self.store.put(slots.cpu().numpy(), rows.cpu().numpy(), version)

    def rows(self, pool: object, req: object, count: int) -> Found:
        """Rows of a request's first `count` tokens; `pool` is the engine's table of their slots."""
        number = req.kv.req_pool_idx if hasattr(getattr(req, "kv", None), "req_pool_idx") else req.req_pool_idx
        return self.store.find(pool.req_to_token[number][:count].long().cpu().numpy())

    def pushed_out(self, *, req: object, req_to_token_pool: object, **_: object) -> None:
        """Before `release_req`: keep what the sampler computed for tokens that it has already sampled."""
        if self.store is None or req.finished():
            return
        count = len(req.origin_input_ids) + len(req.output_ids) - 1
        if not req.output_ids or count < 1:
            return
        self._kept[req] = self.rows(req_to_token_pool, req, count).behind(self._kept.get(req))

    def finished(self, pool: object, req: object) -> None:
        """A request has ended and still holds its slots: hand its rows over."""
        kept = self._kept.pop(req, None)
        step, _, trajectory = req.rid.partition("/")
        if self.handover is None or not trajectory:
            return
        tokens = np.array([*req.origin_input_ids, *req.output_ids_through_stop], np.int64)
        if not len(req.output_ids_through_stop):
            return  # ended before its first token: nothing to train on
        rows = self.rows(pool, req, len(tokens) - 1).behind(kept)
        self.handover.put(Finished(step=step, trajectory=trajectory, tokens=tokens, rows=rows))


class Ride:
    """Rows on their way to the host, in the shape of SGLang's own routed-experts output."""

    def __init__(self, plugin: Plugin, inner: object | None, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self.plugin, self.inner, self.slots, self.rows = plugin, inner, slots, rows
        self.version = plugin.version

    def map_device_tensors(self, copy) -> None:
        """SGLang's device-to-host copy, on its copy stream."""
        if self.inner is not None:
            self.inner.map_device_tensors(copy)
        self.slots, self.rows = copy(self.slots), copy(self.rows)

    def finalize(self) -> None:
        """The copies have arrived."""
        if self.inner is not None:
            self.inner.finalize()
        self.plugin.arrived(self.slots, self.rows, self.version)


def own_routes(output: object | None) -> None:
    """Give SGLang's routed experts a tensor of their own: up to 0.5.17 they are the buffer that the next forward
    writes, while the copy stream may still read it. (None where they are on the host already.)"""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if output is None or (capturer := get_global_experts_capturer()) is None:
        return
    shared = capturer.device_cache.buffer.untyped_storage().data_ptr()
    if output.topk.untyped_storage().data_ptr() == shared:
        output.topk = output.topk.clone()


def settle(*_args, **_named) -> None:
    """Before weights are written: wait for the GPU. SGLang writes them on the scheduler's stream, which under overlap
    scheduling does not wait for a forward, and a pause in place leaves one running."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank(runner: object) -> tuple[int, int]:
    """This process's tensor-parallel rank and their number: with the runner in 0.5.17, in the process's context in
    0.5.23."""
    if hasattr(runner, "ps"):
        return runner.ps.tp_rank, runner.ps.tp_size
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank, get_parallel().tp_size


def _after_weights() -> str:
    """The updater's method that hears of new weights: with their version in 0.5.23, with the request in 0.5.17."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    known = hasattr(SchedulerWeightUpdaterManager, "record_weight_version_after_update")
    return "record_weight_version_after_update" if known else "flush_cache_after_weight_update"


def register() -> None:
    """Entry point `sglang.srt.plugins`."""
    settings = Settings.from_environment()
    if settings is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = Plugin(settings)
    if (watch := Stopwatch.from_environment()) is not None:
        plugin.forward = watch.wrap(plugin.forward, forward=True)
        plugin.finished = watch.wrap(plugin.finished)
        plugin.pushed_out = watch.wrap(plugin.pushed_out)
        plugin.arrived = watch.wrap(plugin.arrived)

    def hook(target: str, function, kind) -> None:
        plugin.targets.append(target)
        HookRegistry.register(target, function, kind)

    def after_hidden(out, *_args, **_named):
        return plugin.hidden(out)

    def after_runner_hidden(_out, _gate_up, out, *_args, **_named):
        out.copy_(plugin.hidden(out))

    def around_collect(collect, processor, req):
        collect(processor, req)
        plugin.finished(processor.req_to_token_pool, req)

    def around_experts(run, layer, dispatch_output):
        return plugin.experts(run, layer, dispatch_output)

    def after_update(_result, _updater, told):
        plugin.updated(getattr(told, "weight_version", None) if hasattr(told, "flush_cache") else told)

    hook(f"{RUNNER}.init_routed_experts_capturer", lambda _out, runner: plugin.start(runner), HookType.AFTER)
    hook("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core", around_experts, HookType.AROUND)
    hook("sglang.srt.layers.activation.SiluAndMul.forward_native", after_hidden, HookType.AFTER)
    if torch.cuda.is_available():
        hook(
            "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.silu_and_mul", after_runner_hidden, HookType.AFTER
        )
    hook("sglang.srt.layers.radix_attention.RadixAttention.forward", plugin.attention, HookType.BEFORE)
    if settings.kv_pool == "packed":
        from tracekit.rollout.sglang.packed_attention import refuse_other_readers, replace_backends
        from tracekit.rollout.sglang.packed_pool import packed_bytes, pool_under

        def around_pool(build, configurator, **named):
            return build(configurator, **{**named, "mha_pool_class": pool_under(settings.static_scales)})

        def around_size(count, *args, **named):
            return packed_bytes(count(*args, **named))

        hook(f"{CONFIGURATOR}._build_mha_kv_pool", around_pool, HookType.AROUND)
        hook(f"{SIZES}._compute_cell_size", around_size, HookType.AROUND)
        hook(f"{RUNNER}.init_attention_backends", lambda _out, runner: refuse_other_readers(runner), HookType.AFTER)
        replace_backends()
    if settings.kv is not None:
        hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", lambda *_, **__: False, HookType.REPLACE)
    hook(
        f"{RUNNER}.forward",
        lambda out, runner, batch, *_args, **_named: plugin.forward(out, runner, batch),
        HookType.AFTER,
    )
    hook(f"{RESULTS}._maybe_collect_routed_experts", around_collect, HookType.AROUND)
    hook("sglang.srt.managers.schedule_batch.release_req", lambda **named: plugin.pushed_out(**named), HookType.BEFORE)
    hook(f"{UPDATER}.{_after_weights()}", after_update, HookType.AFTER)
    for source in ("disk", "distributed", "tensor", "ipc"):
        hook(f"{UPDATER}.update_weights_from_{source}", settle, HookType.BEFORE)
    if not torch.cuda.is_available():
        use_plain_memory()
