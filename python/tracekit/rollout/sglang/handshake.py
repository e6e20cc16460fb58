"""Before step 0: an engine shows that it does what the learner will assume."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import numpy as np

from tracekit.errors import EngineError
from tracekit.guidance import open_dataset
from tracekit.rollout.sglang.engine import SGLangEngine

COMMIT_SECONDS = 15
PROMPT = 12
TOP = 8
TOLERANCE = 0.2


def shake_hands(engine: SGLangEngine, vocab_size: int) -> None:
    """Sample a little from `engine` and compare with what was agreed. Raises EngineError naming the first difference.

    Checked: log-probs are scaled by the temperature, routed experts are given and are not all expert 0, records are
    written where the learner reads, under the learner's settings, and carry the version that was published.
    """
    where = getattr(engine, "urls", ["the SGLang engine"])[0]
    prompt = [(3 + 5 * i) % vocab_size for i in range(PROMPT)]
    ask = {"group_size": 1, "max_response_len": 2, "topk": min(TOP, vocab_size)}
    warm = engine.generate([prompt], temperature=1.0, **ask)
    _routes(warm.routes[0, : PROMPT + int(warm.response_len[0]) - 1], engine.top_k, where)
    hot = engine.generate([prompt], temperature=2.0, **ask)
    spread = [float(np.ptp(r.topk_logp[0, 0])) for r in (warm, hot)]
    if abs(spread[0] - 2 * spread[1]) > TOLERANCE * spread[0]:
        raise EngineError(
            f"{where}: log-probs are not scaled by the temperature "
            f"(spread {spread[0]:.3f} at 1, {spread[1]:.3f} at 2)\n"
            "unset SGLANG_RETURN_ORIGINAL_LOGPROB where the engine starts"
        )
    if engine.settings.sites:
        _records(engine, prompt, where)


def _routes(routes: np.ndarray, top_k: int, where: str) -> None:
    distinct = all(len(set(ids)) == top_k for ids in routes.reshape(-1, top_k).tolist())
    if not distinct or not routes.any(axis=(0, 2)).all():
        raise EngineError(
            f"{where}: the routed experts it returns are empty, so replay would be wrong\n"
            "choose a MoE runner whose router SGLang sees (moe_runner_backend flashinfer_trtllm_routed or triton)"
        )


def _records(engine: SGLangEngine, prompt: list[int], where: str) -> None:
    step = f"handshake-{uuid.uuid4().hex[:8]}"
    folder = Path(engine.settings.folder) / step
    usual, engine.commit_seconds = engine.commit_seconds, COMMIT_SECONDS
    try:
        rollouts = engine.generate([prompt], group_size=1, temperature=1.0, max_response_len=2, step=step, names=["r0"])
        data = open_dataset(folder)
        record = data["r0"]
    except EngineError as error:
        raise EngineError(
            f"{where} answers but writes no guidance to {folder.parent}: start it by `tracekit serve`, on this file "
            f"system\n{str(error).splitlines()[0]}"
        ) from error
    finally:
        engine.commit_seconds = usual
        shutil.rmtree(folder, ignore_errors=True)
    theirs = data.segments[0]["schema"].user.get("engine")
    if theirs != engine.settings.digest:
        raise EngineError(
            f"{where} has other settings ({theirs}) than this run ({engine.settings.digest}): profiles, sites, scales\n"
            "or folder differ; restart it with this run's engine_model"
        )
    if set(record.policy_version) != {engine.version}:
        raise EngineError(
            f"{where}: records say policy version {record.policy_version}, published was {engine.version}"
        )
    if record.n_ids != int(rollouts.prompt_len[0] + rollouts.response_len[0]):
        raise EngineError(f"{where}: a record of {record.n_ids} tokens for a response that has another length")
