"""The engine that a configuration asks for, serving the learner's weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tracekit.config.schema import Config
from tracekit.learner.learner import Learner
from tracekit.rollout.engine import InProcessEngine
from tracekit.rollout.protocol import Engine
from tracekit.rollout.record import make_schema
from tracekit.runs import RunFolder


def start_engine(
    config: Config,
    run: RunFolder,
    learner: Learner,
    tokenizer: Any,
    *,
    static_scales: dict[str, torch.Tensor] | None,
) -> Engine:
    """An engine with the learner's current weights. Raises EngineError when it does not start."""
    weights = learner.publish()
    if config.rollout.engine == "sglang":
        engine = _sglang(config, run, learner, tokenizer, weights, static_scales)
    else:
        engine = InProcessEngine(
            config.model,
            config.quant,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            static_scales=static_scales,
            dtype=getattr(torch, config.rollout.dtype),
        )
    engine.load(weights)
    if config.rollout.engine == "sglang":
        from tracekit.rollout.sglang.handshake import shake_hands

        try:
            for member in engine.members():
                shake_hands(member, learner.vocab_size)
        except BaseException:
            engine.shutdown()
            raise
    return engine


def _sglang(config, run, learner, tokenizer, weights, static_scales):
    from tracekit.learner.hf import published_tensors, save_hf
    from tracekit.rollout.sglang.engine import SGLangEngine
    from tracekit.rollout.sglang.servers import SGLangServers
    from tracekit.rollout.sglang.settings import FILE, Settings
    from tracekit.tasks.tokenizer_hf import save_hf_tokenizer

    folder = run.path / "engine_model"
    ids = {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}

    def save(folder, weights):
        save_hf(folder, learner.model, config.model, learner.vocab_size, weights, **ids)

    save(folder, weights)
    save_hf_tokenizer(folder, tokenizer, max_len=config.model.max_seq_len)
    settings = Settings(
        folder=str(run.guidance.resolve()),
        experts=None if config.quant.experts == "none" else config.quant.experts,
        kv=None if config.quant.kv == "none" else config.quant.kv,
        kv_pool=config.rollout.kv_pool,
        static_scales={site: float(g) for site, g in (static_scales or {}).items()},
        sites=make_schema(config, static_scales).sites,
        encoding=config.guidance.encoding,
        user={"run": config.name},
    )
    settings.save(folder / FILE)
    sizes = {"layers": config.model.n_layers, "top_k": config.model.top_k, "eos_id": tokenizer.eos_id}
    if config.rollout.servers:
        return SGLangServers(
            config.rollout.servers,
            settings,
            save_weights=save,
            weights_folder=run.path / "published",
            timeout=config.rollout.server_timeout,
            **sizes,
        )
    return SGLangEngine(
        folder,
        settings,
        tensors=partial(published_tensors, learner.model),
        **sizes,
        context=config.model.max_seq_len,
        seed=config.seed,
        arguments=config.rollout.sglang,
        timeout=config.rollout.server_timeout,
    )
