"""An SGLang engine of this machine as the sampler: start, publish, generate."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracekit.errors import EngineError
from tracekit.rollout.protocol import PublishedWeights, Rollouts
from tracekit.rollout.sglang import platform
from tracekit.rollout.sglang.settings import Settings

SEAL_SECONDS = 30
"""How long a scheduler that ends may take to seal its last dataset."""


class SGLangEngine:
    """`protocol.Engine` over `sglang.Engine`. The plugin inside it writes guidance; see `generate`."""

    writes_guidance = True
    commit_seconds = 60
    """How long the records of finished responses may take to appear on disk."""

    def __init__(
        self,
        model_folder: Path,
        settings: Settings,
        *,
        tensors: Callable[[PublishedWeights], dict[str, torch.Tensor]],
        layers: int,
        top_k: int,
        eos_id: int,
        context: int,
        seed: int,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """Start an engine that serves `model_folder`. `tensors` gives published weights their Hugging Face names.

        Raises EngineError when SGLang is not installed or does not start.
        """
        try:
            import sglang
        except ImportError as error:
            raise EngineError(
                f'rollout.engine = "sglang" needs SGLang in this environment ({error}); see docs/sglang.md'
            ) from None
        self.settings, self.eos_id, self.layers, self.top_k = settings, eos_id, layers, top_k
        self.version = -1
        self._tensors = tensors
        os.environ.update(settings.to_environment())
        options = {
            "model_path": str(model_folder),
            "context_length": context,
            "random_seed": seed,
            **engine_options(),
            **(arguments or {}),
        }
        start = time.monotonic()
        try:
            self._engine = sglang.Engine(**options)
        except Exception as error:
            raise EngineError(f"the SGLang engine did not start: {str(error).splitlines()[0]}") from error
        self.start_seconds = time.monotonic() - start

    def load(self, weights: PublishedWeights) -> None:
        """Publish every tensor in one update session; the prefix cache, whose rows are of older weights, is dropped."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        named = [(name, t.contiguous()) for name, t in self._tensors(weights).items()]
        manager = self._engine.tokenizer_manager

        async def session() -> list[Any]:
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=self._engine._serialize_tensors_per_rank(named, None),
                flush_cache=True,
                weight_version=str(weights.version),
            )
            return [
                await manager.begin_weight_update(BeginWeightUpdateReqInput(), None),
                await manager.update_weights_from_tensor(update, None),
                await manager.end_weight_update(EndWeightUpdateReqInput(), None),
            ]

        for done in self._run(session()):
            if not done[0]:
                raise EngineError(f"publishing version {weights.version} failed: {done[1]}")
        self.version = weights.version

    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int,
        temperature: float,
        max_response_len: int,
        seed: int = 0,
        topk: int = 0,
        step: str = "",
        names: Sequence[str] = (),
    ) -> Rollouts:
        """As `protocol.Engine.generate`, but that SGLang draws by its own seed. With `names`, one a row, the plugin
        records each response under its name in the dataset `step`; this returns when all of them can be read."""
        rows = [p for p in prompts for _ in range(group_size)]
        options = {
            "temperature": temperature,
            "max_new_tokens": max_response_len,
            "stop_token_ids": [self.eos_id],
            "top_p": 1.0,
            "top_k": -1,
        }
        request = {
            "input_ids": rows,
            "sampling_params": options,
            "rid": [f"{step}/{name}" for name in names] if names else None,
            "return_logprob": True,
            "top_logprobs_num": topk,
            "return_routed_experts": True,
        }
        outs = self._ask(request, group_size)
        rollouts = self._rollouts(prompts, outs, group_size, max_response_len, topk)
        if names:
            self._wait_for(step, names)
            rollouts.trajectory = list(names)
        return rollouts

    def members(self) -> list[SGLangEngine]:
        """The engines behind this one, to check each by itself."""
        return [self]

    def shutdown(self) -> None:
        """End the engine's processes. Its schedulers first: SGLang would kill them before their last dataset is
        sealed."""
        import psutil

        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()  # it takes a child's end for a crash
        ours = psutil.Process().children(recursive=True)
        schedulers = [child for child in ours if "".join(child.cmdline()[:1]).startswith("sglang::scheduler")]
        for scheduler in schedulers:
            scheduler.terminate()
        psutil.wait_procs(schedulers, timeout=SEAL_SECONDS)
        self._engine.shutdown()

    def _ask(self, request: dict[str, Any], group_size: int) -> list[dict[str, Any]]:
        """SGLang's answers to `request`, in the order of its rows."""
        try:
            return self._engine.generate(**request)
        except Exception as error:
            raise EngineError(f"the SGLang engine failed: {str(error).splitlines()[0]}") from error

    def _run(self, coroutine: Any) -> Any:
        try:
            return self._engine.loop.run_until_complete(coroutine)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the SGLang engine failed: {str(error).splitlines()[0]}") from error

    def _wait_for(self, step: str, names: Sequence[str]) -> None:
        from tracekit.errors import DataError
        from tracekit.guidance import open_dataset

        folder, until = Path(self.settings.folder) / step, time.monotonic() + self.commit_seconds
        missing = set(names)
        while missing:
            try:
                missing -= set(open_dataset(folder).ids())
            except (DataError, FileNotFoundError):
                pass  # nothing committed yet
            if missing and time.monotonic() > until:
                raise EngineError(
                    f"{len(missing)} of {len(names)} responses have no guidance in {folder} after "
                    f"{self.commit_seconds} s (first: {min(missing)}); see the engine's log for the plugin's error"
                )
            if missing:
                time.sleep(0.02)

    def _rollouts(self, prompts, outs, group_size: int, limit: int, topk: int) -> Rollouts:
        n = len(outs)
        prompt_len = np.repeat([len(p) for p in prompts], group_size).astype(np.int64)
        sampled = [out["output_ids"] for out in outs]
        response_len = np.array([len(ids) for ids in sampled], np.int64)
        width = int((prompt_len + response_len).max())
        tokens = np.zeros((n, width), np.int64)
        routes = np.zeros((n, width, self.layers, self.top_k), np.uint8)
        logp = np.zeros((n, limit), np.float32)
        top_ids = np.zeros((n, limit, topk), np.int32) if topk else None
        top_logp = np.full((n, limit, topk), -np.inf, np.float32) if topk else None
        finished = np.zeros(n, bool)
        for i, out in enumerate(outs):
            meta, ids = out["meta_info"], sampled[i]
            tokens[i, : prompt_len[i]] = prompts[i // group_size]
            tokens[i, prompt_len[i] : prompt_len[i] + len(ids)] = ids
            logp[i, : len(ids)] = [entry[0] for entry in meta["output_token_logprobs"]]
            chosen = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            chosen = chosen.reshape(-1, self.layers, self.top_k)
            if len(chosen) != prompt_len[i] + len(ids) - 1:
                raise EngineError(
                    f"{len(chosen)} routed rows for {prompt_len[i] + len(ids)} tokens: replay would shift"
                )
            routes[i, : len(chosen)] = chosen
            finished[i] = meta["finish_reason"]["type"] == "stop"
            for t, entries in enumerate(meta.get("output_top_logprobs") or []) if topk else ():
                top_logp[i, t, : len(entries)] = [entry[0] for entry in entries]
                top_ids[i, t, : len(entries)] = [entry[1] for entry in entries]
        return Rollouts(
            tokens=tokens,
            prompt_len=prompt_len,
            response_len=response_len,
            logp_mu=logp,
            routes=routes,
            finished=finished,
            group=np.repeat(np.arange(len(prompts)), group_size),
            version=self.version,
            topk_ids=top_ids,
            topk_logp=top_logp,
        )


def engine_options() -> dict[str, Any]:
    """Arguments of `sglang.Engine` that capture needs or that suit this machine."""
    return {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "enable_return_routed_experts": True,
        "log_level": "warning",
        **(_cpu_options() if not torch.cuda.is_available() else {"attention_backend": "triton"}),
    }


def _cpu_options() -> dict[str, Any]:
    os.environ[platform.VARIABLE] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes on few cores
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 8192,
        "max_running_requests": 64,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.3,
    }
