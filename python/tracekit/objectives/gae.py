"""PPO's advantages from a critic, and the critic's loss.

    d_t = R_t + gamma V_{t+1} - V_t        A_t = d_t + gamma lambda A_{t+1}        G_t = A_t + V_t

V_t is the critic at the position that predicts token t, 0 after the last sampled token. Masked-out tokens are skipped:
the recursion carries A and V over them. Sources: GAE, arXiv 1506.02438; PPO, 1707.06347; gamma = lambda = 1 and the
clipped value loss as in verl.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tracekit.errors import DataError
from tracekit.objectives.batch import LossBatch, LossOutput, StepTotals
from tracekit.objectives.metrics import Metrics
from tracekit.objectives.segments import Segments


def token_rewards(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor | None = None, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Outcome reward [N] on the last masked-in token of each response, minus kl_coef * kl on every one.

    mask: [N, T], or packed with segment_ids of the same shape. Returns the shape of mask, 0 elsewhere.
    """
    seg = _segments(mask, segment_ids, rewards.numel())
    flat = mask.reshape(-1).bool() & (seg.ids >= 0)
    rank = seg.rank(flat)
    count = seg.spread(seg.sum(flat.long()))
    out = torch.where(flat & (rank == count - 1), seg.spread(rewards.float()), 0.0)
    if kl is not None and kl_coef:
        out = out - torch.where(flat, kl_coef * kl.reshape(-1).float(), 0.0)
    return out.reshape(mask.shape)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    segment_ids: Tensor | None = None,
    n_segments: int | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, shape of mask, 0 where it is false; no gradient.

    rewards, values, mask: [N, T], or packed with segment_ids of that shape and n_segments. Whiten the advantages over
    the global batch with `whiten`.
    """
    seg = _segments(mask, segment_ids, n_segments)
    flat = mask.reshape(-1).bool() & (seg.ids >= 0)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    index = torch.nonzero(flat).reshape(-1)
    row, column = seg.ids[index], seg.rank(flat)[index]
    width = int(column.max()) + 1 if index.numel() else 0
    r, v = (torch.zeros(seg.n, width + 1, dtype=dtype, device=mask.device) for _ in range(2))
    inside = torch.zeros(seg.n, width + 1, dtype=torch.bool, device=mask.device)
    r[row, column] = rewards.detach().reshape(-1)[index].to(dtype)
    v[row, column] = values.detach().reshape(-1)[index].to(dtype)
    inside[row, column] = True
    advantage = torch.zeros_like(r)
    # Only sampled tokens are left, in order, so skipping masked spans is what packing them together did.
    for t in range(width - 1, -1, -1):
        delta = r[:, t] + gamma * v[:, t + 1] - v[:, t]
        advantage[:, t] = torch.where(inside[:, t], delta + gamma * lam * advantage[:, t + 1], 0.0)
    a, g = (torch.zeros(flat.numel(), dtype=dtype, device=mask.device) for _ in range(2))
    a[index] = advantage[row, column]
    g[index] = (advantage + v)[row, column]
    return a.reshape(mask.shape), g.reshape(mask.shape)


@dataclass(kw_only=True, slots=True)
class Moments:
    """Sum, sum of squares and number of masked-in values; parts add, `reduced` sums over ranks."""

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Moments:
        """Moments of x where mask is true."""
        y = torch.where(mask.bool(), x.detach(), 0.0).double()
        return cls(total=y.sum(), squares=(y * y).sum(), count=mask.sum().double())

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    def reduced(self, process_group: dist.ProcessGroup | None) -> Moments:
        """Sum over the ranks of the group; None returns self."""
        if process_group is None:
            return self
        packed = torch.stack([self.total, self.squares, self.count])
        dist.all_reduce(packed, group=process_group)
        return Moments(total=packed[0], squares=packed[1], count=packed[2])


def whiten(advantages: Tensor, mask: Tensor, moments: Moments, eps: float = 1e-8) -> Tensor:
    """(A - mean) / sqrt(var + eps) with the moments of the global batch; 0 where mask is false.

    With fewer than two tokens there is no variance: the advantages come back as they are.
    """
    n = moments.count.clamp(min=1.0)
    mean = moments.total / n
    variance = (moments.squares / n - mean * mean).clamp(min=0.0)
    scaled = (advantages.double() - mean) / torch.sqrt(variance + eps)
    scaled = torch.where(moments.count < 2, advantages.double(), scaled)
    return torch.where(mask.bool(), scaled, 0.0).to(advantages.dtype)


def value_loss(batch: LossBatch, *, clip: float | None = 0.5, totals: StepTotals | None = None) -> LossOutput:
    """Critic loss 0.5 mean(max((V - G)^2, (clip(V, V_old ± clip) - G)^2)) over the step's tokens.

    batch: `values` (graph) and `returns`, with `values_old` unless clip is None. `coefficients` is d loss / d values.
    Metrics: `critic/loss`, `critic/vf_clipfrac`, `critic/explained_variance`, value and return means.
    Raises: DataError for a missing tensor.
    """
    needed = ("values", "returns") if clip is None else ("values", "returns", "values_old")
    for name in needed:
        if getattr(batch, name) is None:
            raise DataError(f"value_loss needs LossBatch.{name}")
    mask = batch.flat(batch.mask).bool() & (batch.flat_segment_ids() >= 0)
    raw = batch.flat(batch.values)
    dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
    live = mask & torch.isfinite(raw) & torch.isfinite(batch.flat(batch.returns))
    v = torch.where(live, raw.to(dtype), 0.0)
    g = torch.where(live, batch.flat(batch.returns).detach().to(dtype), 0.0)
    error = v - g
    square, slope = error * error, error.detach()
    clipped = torch.zeros_like(live)
    if clip is not None:
        old = torch.where(live, batch.flat(batch.values_old).detach().to(dtype), 0.0)
        held = torch.maximum(torch.minimum(v, old + clip), old - clip)
        other = held - g
        clipped = (other * other).detach() > square.detach()
        square = torch.where(clipped, other * other, square)
        slope = torch.where(clipped & ((v.detach() - old).abs() > clip), 0.0, slope)
    tokens = totals.tokens if totals is not None else (batch.totals.tokens if batch.totals is not None else mask.sum())
    k = 1.0 / torch.as_tensor(tokens, dtype=dtype, device=v.device).clamp(min=1.0)
    loss = 0.5 * k * torch.where(live, square, 0.0).sum()
    m = Metrics()
    m.sums("critic", {"loss": loss})
    m.recipe("critic/loss", "sum", "critic:loss")
    m.means(
        "critic:means",
        {"critic/vf_clipfrac": clipped.to(dtype), "critic/value_mean": v, "critic/return_mean": g},
        live,
    )
    e = error.detach()
    m.token_sums("critic:ev", {"e": e, "ee": e * e, "g": g, "gg": g * g}, live)
    m.recipe(
        "critic/explained_variance", "explained_variance", *(f"critic:ev:{c}" for c in ("e", "ee", "g", "gg", "n"))
    )
    coefficients = torch.where(live, k * slope, 0.0).detach().reshape(batch.mask.shape)
    return LossOutput(loss=loss, coefficients=coefficients, metrics=m, nonfinite=(mask & ~live).sum())


def _segments(mask: Tensor, segment_ids: Tensor | None, n: int | None) -> Segments:
    if segment_ids is not None:
        if n is None:
            raise DataError("packed layout: pass the number of responses with segment_ids")
        return Segments(segment_ids.reshape(-1), n)
    rows, width = mask.shape
    return Segments(torch.arange(rows, device=mask.device).repeat_interleave(width), rows)
