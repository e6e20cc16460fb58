"""The learner: torchtitan's model, optimizer, schedule and checkpoints around a guided forward."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from tracekit.config.schema import Config
from tracekit.errors import ConfigError, DataError
from tracekit.learner.network import Network  # installs the compat patches first

from torchtitan.components.optimizer import (  # isort: skip
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from tracekit.rollout.protocol import PublishedWeights

MAX_SKIPPED = 4
"""Updates without a finite gradient, one after another, that end a run."""


def init_process_group(device: torch.device) -> None:
    """One process, unless a launcher has set the environment; torchtitan's checkpoints need a group."""
    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("the in-process engine trains in one process: start it without torchrun")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Learner(Network):
    """The policy in training. Gradients accumulate over `backward` calls until `optimizer_step`."""

    def __init__(self, config: Config, vocab_size: int, *, device: torch.device) -> None:
        init_process_group(device)
        super().__init__(config, vocab_size, device=device)
        self.version = 0
        self.skipped = 0
        """Updates in a row that were left out because a loss or gradient was not finite."""

    # -- optimizer

    def start(self, *, lr: float, steps: int, warmup_steps: int, decay_ratio: float = 0.0) -> None:
        """Fresh optimizer and schedule for a phase of `steps` optimizer steps."""
        o = self.config.optim
        self.optimizers = OptimizersContainer.Config(
            implementation="foreach",
            param_groups=[
                ParamGroupConfig(
                    pattern=".*",
                    optimizer_name="AdamW",
                    optimizer_kwargs={
                        "lr": lr,
                        "betas": (0.9, o.beta2),
                        "eps": 1e-8,
                        "weight_decay": o.weight_decay,
                    },
                )
            ],
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(
            warmup_steps=warmup_steps, decay_ratio=decay_ratio, min_lr_factor=0.1
        ).build(optimizers=self.optimizers, training_steps=steps)

    def optimizer_step(self, max_grad_norm: float, *, skip: bool = False) -> float:
        """Clip, step, round the experts afresh. Returns the gradient norm; a non-finite one, or `skip`, leaves the
        weights as they are."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        if torch.isfinite(norm) and not skip:
            self.optimizers.step()
            self.skipped = 0
        else:
            self.skipped += 1
            if self.skipped == MAX_SKIPPED:
                raise DataError(
                    f"{MAX_SKIPPED} updates in a row had no finite gradient: the model has diverged\n"
                    "lower optim.lr (or warmstart.lr and start over with --clean), then --resume from the checkpoint"
                )
        self.optimizers.zero_grad()
        self.schedulers.step()
        self.refresh()
        return float(norm)

    @property
    def lr_factor(self) -> float:
        """Where the schedule stands: the current learning rate as a share of the phase's."""
        group = self.optimizers.optimizers[0].param_groups[0]
        return float(group["lr"]) / float(group["initial_lr"])

    # -- weights

    def publish(self) -> PublishedWeights:
        """What the sampler is to serve: the very tensors that the forwards since the last optimizer step used."""
        names = {f"{module}.{w}": (m, w) for module, m in self.experts.items() for w in ("w1_EFD", "w2_EDF", "w3_EFD")}
        state = self.model.state_dict()
        experts = {name: m.packed[w] if m.packed else state[name].detach().bfloat16() for name, (m, w) in names.items()}
        dense = {name: t.detach().bfloat16() for name, t in state.items() if name not in names}
        return PublishedWeights(version=self.version, dense=dense, experts=experts)
