"""What an objective remembers between steps, and keeps in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import DataError

if TYPE_CHECKING:
    from tracekit.objectives.metrics import Metrics
    from tracekit.objectives.terms import Terms


def discrepancy(t: Terms) -> Tensor:
    """Y of each response [n]: mean over its tokens of |exp(logp_old) - exp(logp_mu)| (2607.24062 eqs 8, 12)."""
    return t.mean((torch.exp(t.learner_old) - torch.exp(t.mu)).abs())


@dataclass(kw_only=True, slots=True)
class ObjectiveState:
    """ACRL's reference discrepancy X and the discrepancies Y of the current rollout batch.

    X outlives a step: it goes into the checkpoint and is never measured again on resume. The rest is of the batch.
    """

    x: float | None = None
    """X (2607.24062 eq. 9): mean over responses of Y, before the first update."""
    x_source: str | None = None
    """`given`, `step0` (the first rollout batch) or `reference` (unfiltered responses or a baseline set)."""
    x_responses: int = 0
    """Responses X was measured on."""
    batch_y: float | None = None
    """Mean Y of the rollout batch."""
    group_y: dict[int, float] = field(default_factory=dict)
    """Mean Y of each prompt of the rollout batch."""

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"x": self.x, "x_source": self.x_source, "x_responses": self.x_responses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises: DataError if keys are missing."""
        missing = {"x", "x_source", "x_responses"} - set(state)
        if missing:
            raise DataError(f"objective state lacks {', '.join(sorted(missing))}; the checkpoint is of another version")
        self.x, self.x_source, self.x_responses = state["x"], state["x_source"], state["x_responses"]

    def measure(
        self, batch: list[Terms], process_group: dist.ProcessGroup | None, *, reference: list[Terms] | None = None
    ) -> None:
        """Set Y of the batch and its prompts and, if X is not known, X. Collective."""
        total, count, groups = _response_sums(batch, process_group)
        self.batch_y = total / count if count else None
        self.group_y = {g: s / n for g, (s, n) in groups.items()}
        if self.x is not None:
            return
        if reference is not None:
            total, count, _ = _response_sums(reference, process_group)
        if count:
            self.x, self.x_responses = total / count, count
            self.x_source = "step0" if reference is None else "reference"

    def record(self, m: Metrics, t: Terms) -> None:
        """`acrl/Y_*` for any run, and Y against X once X is known."""
        y = discrepancy(t)
        counted = t.seg.sum(t.live.to(y.dtype)) > 0
        m.token_sums("acrl_y", {"y": y, "yy": y * y}, counted)
        m.recipe("acrl/Y_mean", "mean", "acrl_y:y", "acrl_y:n")
        m.recipe("acrl/Y_std", "std", "acrl_y:y", "acrl_y:yy", "acrl_y:n")
        m.maxima("acrl_y", {"acrl/Y_max": y, "-acrl/Y_min": -y}, counted)
        if self.x:
            above = {"acrl/Y_over_X_mean": y / self.x, "acrl/frac_Y_gt_X": (y > self.x).to(y.dtype)}
            m.means("acrl_x", {**above, "acrl/X": torch.full_like(y, self.x)}, counted)


def _response_sums(
    batches: Iterable[Terms], process_group: dist.ProcessGroup | None
) -> tuple[float, int, dict[int, tuple[float, int]]]:
    """Sum of Y, number of responses, and both by prompt, over all ranks."""
    groups: dict[int, tuple[float, int]] = {}
    total, count = 0.0, 0
    for t in batches:
        counted = (t.seg.sum(t.live.to(t.old.dtype)) > 0).tolist()
        ys = discrepancy(t).double().tolist()
        ids = [None] * len(ys) if t.batch.group is None else t.batch.group.tolist()
        for y, used, g in zip(ys, counted, ids, strict=True):
            if not used:
                continue
            total, count = total + y, count + 1
            if g is not None:
                s, n = groups.get(g, (0.0, 0))
                groups[g] = (s + y, n + 1)
    if process_group is None:
        return total, count, groups
    parts: list = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, (total, count, groups), group=process_group)
    merged: dict[int, tuple[float, int]] = {}
    for _, _, part in parts:
        for g, (s, n) in part.items():
            a, b = merged.get(g, (0.0, 0))
            merged[g] = (a + s, b + n)
    return sum(p[0] for p in parts), sum(p[1] for p in parts), merged
