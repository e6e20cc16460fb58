"""An SGLang engine of this machine as the sampler: start, publish, generate."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracekit.errors import EngineError
from tracekit.rollout.protocol import PublishedWeights, Rollouts
from tracekit.rollout.sglang import platform, process
from tracekit.rollout.sglang.settings import Settings

PROBE = [3, 2, 3]
"""Token ids that any vocabulary has."""


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
        timeout: float = 600,
    ) -> None:
        """Start an engine that serves `model_folder`. `tensors` gives published weights their Hugging Face names;
        `timeout` is how many seconds a request or an update may take.

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
        self._tensors, self._timeout = tensors, timeout
        self._task: asyncio.Task | None = None
        os.environ.update(settings.to_environment())
        options = {
            "model_path": str(model_folder),
            "context_length": context,
            "random_seed": seed,
            "custom_sigquit_handler": process.ended_at_start,
            **engine_options(settings),
            **(arguments or {}),
        }
        start = time.monotonic()
        try:
            self._engine = sglang.Engine(**options)
        except Exception as error:
            raise EngineError(f"the SGLang engine did not start: {_first_line(error)}") from error
        process.take_signals(self._engine, self._child_ended)
        self.start_seconds = time.monotonic() - start

    def load(self, weights: PublishedWeights) -> None:
        """Publish every tensor at once; the prefix cache, whose rows are of older weights, is dropped.

        In an update session where this SGLang has them, else by a plain update: releases up to 0.5.17 load what they
        are sent and do nothing more, which is right for tensors in the layout that was loaded.
        """
        from sglang.srt.managers import io_struct

        named = [(name, t.contiguous()) for name, t in self._tensors(weights).items()]
        manager = self._engine.tokenizer_manager
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._engine._serialize_tensors_per_rank(named, None),
            flush_cache=True,
            weight_version=str(weights.version),
        )

        async def publish() -> list[Any]:
            if not self._has_sessions():
                return [await manager.update_weights_from_tensor(update, None)]
            return [
                await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None),
                await manager.update_weights_from_tensor(update, None),
                await manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None),
            ]

        for done in self._run(publish(), f"publishing version {weights.version}"):
            if not done[0]:
                raise EngineError(f"publishing version {weights.version} failed: {done[1]}")
        self.version = weights.version
        self._probe()

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
        """End the engine's processes; its last dataset is sealed first."""
        process.end(self._engine)

    def _ask(self, request: dict[str, Any], group_size: int) -> list[dict[str, Any]]:
        """SGLang's answers to `request`, in the order of its rows."""
        return self._run(self._engine.async_generate(**request), "sampling")

    def _probe(self) -> None:
        """Sample one token. Raises EngineError when the engine does not serve the version that it was given, or makes
        no numbers of its weights."""
        options = {"temperature": 0.0, "max_new_tokens": 1}
        request = {"input_ids": [PROBE], "sampling_params": [options], "rid": None, "return_logprob": True}
        for member in self.members():
            (out,) = member._ask(request, 1)
            meta = out["meta_info"]
            where = getattr(member, "urls", ["the SGLang engine"])[0]
            if meta["weight_version"] != str(self.version):
                raise EngineError(f"{where} serves version {meta['weight_version']}, published was {self.version}")
            logp = meta["output_token_logprobs"][0][0]
            if logp is None or not math.isfinite(logp):
                raise EngineError(f"{where}: the weights of version {self.version} give a log-prob of {logp}")

    def _run(self, coroutine: Coroutine, what: str) -> Any:
        """What `coroutine` gives, within the timeout and as long as the engine's processes live."""
        loop = self._engine.loop
        self._task = loop.create_task(asyncio.wait_for(coroutine, self._timeout))
        try:
            return loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            raise EngineError(
                f"the SGLang engine died ({what}): {process.ENDED}\ncontinue with --resume, which starts another"
            ) from None
        except TimeoutError:
            raise EngineError(
                f"the SGLang engine did not answer within {self._timeout:g} s ({what}; rollout.server_timeout)"
            ) from None
        except Exception as error:
            raise EngineError(f"the SGLang engine failed ({what}): {_first_line(error)}") from error
        finally:
            self._task = None

    def _child_ended(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @staticmethod
    def _has_sessions() -> bool:
        from sglang.srt.managers import io_struct

        return hasattr(io_struct, "BeginWeightUpdateReqInput")

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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def engine_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `sglang.Engine` that capture needs or that suit this machine."""
    packed = settings.kv_pool == "packed" and torch.cuda.is_available()
    return {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "enable_return_routed_experts": True,
        "log_level": "warning",
        **(_cpu_options() if not torch.cuda.is_available() else {"attention_backend": "triton"}),
        **({"page_size": 64, "cuda_graph_backend_prefill": "disabled"} if packed else {}),
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
