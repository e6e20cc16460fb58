"""A loop on an untrained tiny model, with rewards that are drawn instead of earned."""

from types import SimpleNamespace

import numpy as np
import torch

from tracekit import config as tk
from tracekit.guidance import open_dataset
from tracekit.learner.critic import Critic
from tracekit.learner.learner import Learner
from tracekit.learner.loop import Loop
from tracekit.learner.reference import Reference
from tracekit.learner.state import LoopState
from tracekit.learner.update import Experience
from tracekit.objectives import from_config
from tracekit.runs import RunFolder
from tracekit.tasks import CharTokenizer, load_task

TINY = [
    "--model.n-layers", "2", "--model.max-seq-len", "32", "--optim.row-len", "48", "--optim.microbatch-tokens", "96",
    "--task.name", "chain_sum", "--task.eval-size", "16", "--task.train-size", "200", "--warmstart.steps", "0",
    "--rollout.prompts-per-step", "4", "--rollout.group-size", "4", "--rollout.max-response-len", "6",
    "--guidance.keep-steps", "-1", "--optim.lr", "2e-3", "--optim.warmup-steps", "0",
]  # fmt: skip


def build(out, *flags, note=print):
    """Config, loop and what it was made of; `out` is a fresh folder."""
    c = tk.load([], ["--out", str(out), *TINY, *flags])
    tk.validate(c)
    run = RunFolder.create(c)
    task = load_task(c.task, c.seed)
    tokenizer = CharTokenizer.for_task(task)
    learner = Learner(c, tokenizer.vocab_size, device=torch.device("cpu"))
    learner.start(lr=c.optim.lr, steps=100, warmup_steps=0)
    scales = {f"layers.{i}.{k}": 128.0 for i in range(2) for k in ("moe_input", "moe_hidden", "k", "v")}
    objective = from_config(c.algo, c.rollout)
    critic = Critic(c, learner) if objective.needs_values else None
    reference = Reference(c, learner, run, fresh=True) if objective.needs_ref or c.algo.kl_reward_coef else None
    state = LoopState(static_scales=scales)
    loop = Loop(
        c, run, learner, task, tokenizer, state, objective=objective, critic=critic, reference=reference, note=note
    )
    run.release()
    return SimpleNamespace(config=c, run=run, task=task, learner=learner, loop=loop, critic=critic, tokenizer=tokenizer)


def opened(built, step=1, prompts=4, seed=0):
    """An experience of random rewards, with its log-probs and advantages."""
    loop = built.loop
    rollouts, _ = loop.sampler.sample([built.task.train[i] for i in range(prompts)], step)
    rewards = np.random.default_rng(seed).integers(0, 2, len(rollouts.group)).astype(np.float32)
    reader = open_dataset(loop.sampler.folder(step)) if loop.sampler.sites else None
    x = Experience.of(rollouts, rewards, reader)
    loop.update.open(x)
    loop.update.advantages(x)
    loop.objective.begin_batch([loop.update.whole_batch(x)])
    return x


def gradients(built, x):
    """Gradient of each of the policy's (and a shared critic's) parameters over all rows of `x`, and the outputs."""
    update = built.loop.update
    which = np.arange(len(x.rewards))
    batches = list(update.batches(x.rollouts, x.advantages, which))
    totals = update.totals(batches, x)
    built.learner.model.zero_grad()
    named = dict(built.learner.model.named_parameters())
    if built.critic is not None:
        built.critic.head.zero_grad()
        named |= {f"critic.{n}": p for n, p in built.critic.head.named_parameters()}
    outs = []
    for batch in batches:
        outs += update.backward(batch, update.guide(batch, x), update.loss_batch(batch, x).with_(totals=totals))
    return {n: p.grad.clone() for n, p in named.items() if p.grad is not None}, outs
