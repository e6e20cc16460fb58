"""`train`: a run from its configuration to its final table."""

from __future__ import annotations

import resource

import numpy as np
import torch

from tracekit.config.schema import Config
from tracekit.learner.calibrate import static_scales
from tracekit.learner.checkpoint import Checkpoints
from tracekit.learner.critic import Critic
from tracekit.learner.learner import Learner
from tracekit.learner.loop import Loop, trim_histograms
from tracekit.learner.reference import Reference
from tracekit.learner.state import Interrupt, LoopState
from tracekit.learner.warmstart import calibrate, warm_start
from tracekit.log import StepLog
from tracekit.objectives import from_config
from tracekit.runs import RunFolder, check_complete, write_complete
from tracekit.tasks import CharTokenizer, PromptSampler, check_fits, load_task

CALIBRATION_PROBLEMS = 256
MEANS = {
    "mean |logp_old - logp_mu|": "mismatch/logprob_abs_diff_mean",
    "guidance bytes per token": "guidance/bytes_per_token",
}
"""Rows of the final table that are means over the steps."""


def train(config: Config, run: RunFolder, resume: bool, log: StepLog) -> int:
    """Train as `config` says, in the folder `run`. Returns the exit code.

    Raises TracekitError for what a person can mend, and KeyboardInterrupt after a checkpoint.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    task = load_task(config.task, config.seed)
    tokenizer = CharTokenizer.for_task(task)
    check_fits(task, tokenizer, config)
    tokenizer.save(run.path / "tokenizer.json")
    learner = Learner(config, tokenizer.vocab_size, device=device)
    log.note(f"{sum(p.numel() for p in learner.model.parameters()):,} parameters, {tokenizer.vocab_size} characters")
    state = LoopState()
    if not resume:
        _prepare(config, run, learner, task, tokenizer, state, log)
    learner.start(
        lr=config.optim.lr,
        steps=config.steps * config.algo.mini_steps,
        warmup_steps=config.optim.warmup_steps,
        decay_ratio=config.optim.decay_ratio,
    )
    objective = from_config(config.algo, config.rollout)
    critic = reference = None
    if objective.needs_ref or config.algo.kl_reward_coef:
        reference = Reference(config, learner, run, fresh=not resume)
    if objective.needs_values:
        critic = Critic(config, learner)
    sampler = PromptSampler(len(task.train), config.seed, task.fingerprint)
    checkpoints = Checkpoints(run, learner, sampler=sampler, state=state, critic=critic, keep=config.checkpoint.keep)
    if resume:
        checkpoints.load(run.resumed_from)
        learner.version = state.version
        learner.refresh()
        trim_histograms(run, state.step)
    loop = Loop(
        config,
        run,
        learner,
        task,
        tokenizer,
        state,
        objective=objective,
        critic=critic,
        reference=reference,
        note=log.note,
    )
    if not resume:
        with log.phase("evaluate", config.task.eval_size) as phase:
            state.before = {"accuracy": loop.evaluate()}
            phase.advance(config.task.eval_size, accuracy=state.before["accuracy"])
        log.event("eval", {"eval/accuracy": state.before["accuracy"]}, step=0)
    if state.step >= config.steps:
        log.note(f"nothing left to do: the run is at step {state.step}, steps = {config.steps}")
    try:
        _steps(config, log, loop, sampler, checkpoints)
        after = loop.evaluate()
    finally:
        loop.close()
    log.event("eval", {"eval/accuracy": after}, step=state.step)
    rows = [("held-out accuracy, greedy", f"{state.before['accuracy']:.1%}", f"{after:.1%}")]
    steps = list(log.recorded())
    for label, key in MEANS.items():
        if values := [line[key] for line in steps if line.get(key) is not None]:
            rows.append((label, float(np.mean(values))))
    rows.append(("peak memory, MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    log.final(rows)
    return 0


def _prepare(config, run, learner, task, tokenizer, state, log) -> None:
    """Warm start (or its cache), then the static scales that its activations ask for."""
    pairs = [
        (tokenizer.encode_prompt(p.prompt), tokenizer.encode_response(p.answer))
        for p in (task.train[i] for i in range(len(task.train)))
    ]
    row_len, pad_id = config.optim.row_len, tokenizer.pad_id
    cache = run.warmstart_dir(config)
    weights = cache / "weights.pt"
    if cache.exists() and check_complete(cache) is None:
        learner.load_weights(weights)
        log.note(f"warm start from {weights}")
    elif config.warmstart.steps:
        with log.phase("warm start", config.warmstart.steps) as phase:
            warm_start(
                learner,
                config,
                pairs,
                row_len=row_len,
                pad_id=pad_id,
                progress=lambda _, loss: phase.advance(1, loss=loss),
            )
        cache.mkdir(parents=True, exist_ok=True)
        learner.save_weights(weights)
        write_complete(cache)
    if config.quant.global_scale == "static":
        amax = calibrate(learner, pairs[:CALIBRATION_PROBLEMS], row_len=row_len, pad_id=pad_id)
        state.static_scales = {site: float(g) for site, g in static_scales(amax, config.quant.headroom).items()}


def _steps(config, log, loop, sampler, checkpoints) -> None:
    """Run the steps that are left."""
    state = loop.state
    with Interrupt() as interrupt:
        for step in range(state.step + 1, config.steps + 1):
            metrics = loop.step(lambda count: [loop.task.train[i] for i in sampler.next(count)], step)
            state.step = step
            if config.log.eval_interval and step % config.log.eval_interval == 0:
                metrics["eval/accuracy"] = loop.evaluate()
            log.step(step, metrics)
            due = step == config.steps or step % config.checkpoint.interval == 0
            if interrupt.requested or due or loop.retention.wants_checkpoint:
                checkpoints.save(step)
                loop.retention.checkpointed(step)
            if interrupt.requested:
                raise KeyboardInterrupt
