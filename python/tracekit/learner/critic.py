"""The critic of gae: a linear head on the policy's network, or on one of its own, with an optimizer of its own."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from tracekit.config.schema import Config
from tracekit.learner.guide import Guide, guided
from tracekit.learner.learner import Learner
from tracekit.learner.network import Network
from tracekit.learner.packing import Microbatch


class Critic:
    """Values at the position that predicts each token. The head starts at 0, so the first values are 0.

    `separate`: a copy of the policy's network, unquantised, routing on its own. `shared`: the policy's hidden states;
    of the value loss's gradient the policy's network receives `algo.vf_coef` times, the head all of it.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self.config, self.learner = config, learner
        self.network: Network | None = None
        self.head = nn.Linear(config.model.dim, 1, device=learner.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        parameters = list(self.head.parameters())
        if config.algo.critic == "separate":
            self.network = Network(config, learner.vocab_size, device=learner.device)
            self.network.experts_profile = None
            self.network.model.load_state_dict(learner.model.state_dict())
            self.network.model.lm_head.requires_grad_(False)
            self.network.refresh()
            parameters += [p for p in self.network.model.parameters() if p.requires_grad]
        self.parameters = parameters
        o = config.optim
        self.lr = config.algo.critic_lr or o.lr
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self.lr, betas=(0.9, o.beta2), eps=1e-8, weight_decay=o.weight_decay
        )

    def values(self, batch: Microbatch, policy_hidden: torch.Tensor | None) -> torch.Tensor:
        """[B, L] float32. `policy_hidden` [B, L, D] is only read by a shared critic."""
        if self.network is None:
            return self.of(policy_hidden)
        with guided(Guide(profiles={}, static_scales=None)):
            hidden = self.network.hidden(batch)
        return self.head(hidden.float())[..., 0]

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [...] of the policy's hidden states [..., D], which receive `vf_coef` of the gradient."""
        share = self.config.algo.vf_coef
        still = hidden.detach()
        return self.head((still + share * (hidden - still) if share else still).float())[..., 0]

    def optimizer_step(self, max_grad_norm: float, *, skip: bool = False) -> float:
        """Clip and step at the schedule of the policy; returns the gradient norm. Call before the policy's step."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        if torch.isfinite(norm) and not skip:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * self.learner.lr_factor
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.network is not None:
            self.network.refresh()
        return float(norm)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """One pickled blob: the optimizer's tensors do not exist before its first step."""
        blob = io.BytesIO()
        network = None if self.network is None else self.network.model.state_dict()
        torch.save({"head": self.head.state_dict(), "network": network, "optimizer": self.optimizer.state_dict()}, blob)
        return {"blob": blob.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        values = torch.load(io.BytesIO(state["blob"]), map_location=self.learner.device, weights_only=True)
        self.head.load_state_dict(values["head"])
        if self.network is not None:
            self.network.model.load_state_dict(values["network"])
            self.network.refresh()
        self.optimizer.load_state_dict(values["optimizer"])
