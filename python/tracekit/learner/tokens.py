"""Numbers of each sampled token, between passes that pack the same responses differently."""

from __future__ import annotations

import numpy as np
import torch

from tracekit.learner.packing import Microbatch
from tracekit.rollout.protocol import Rollouts


class TokenTable:
    """Named arrays float32 [N, R], by rollout row and response column; `token_uid` places packed labels."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.values: dict[str, np.ndarray] = {}

    def put(self, name: str, batch: Microbatch, packed: torch.Tensor) -> None:
        """Keep `packed` [B, L] of the labels that the mask keeps."""
        table = self.values.setdefault(name, np.zeros_like(self.rollouts.logp_mu))
        table[self.where(batch)] = packed[batch.mask].cpu().numpy()

    def get(self, name: str, batch: Microbatch) -> torch.Tensor | None:
        """[B, L], 0 where the mask is false; None for a name that was never kept."""
        if name not in self.values:
            return None
        out = torch.zeros_like(batch.logp_mu)
        out[batch.mask] = torch.from_numpy(self.values[name][self.where(batch)]).to(out.device)
        return out

    def where(self, batch: Microbatch) -> tuple[np.ndarray, np.ndarray]:
        """Rollout row and response column of each label that the mask keeps, in flattened order."""
        uid = batch.token_uid[batch.mask].cpu().numpy()
        row = uid >> 32
        return row, (uid & 0xFFFFFFFF) - (self.rollouts.prompt_len[row] - 1)
