"""Responses into rows of tokens, each group's prompt once, every token addressed by `token_uid`.

A group is packed as its prompt without the last token, then one segment a response: the prompt's last token (which
scores the first sampled one) and the response without its last. Siblings see the prompt and themselves, as they did
in the sampler's cache; a response is never split, and a group that does not fit a row repeats its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tracekit.errors import DataError
from tracekit.rollout.protocol import Rollouts


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """Packed rows of one forward and backward. All tensors are [B, L] unless said otherwise."""

    tokens: torch.Tensor
    """int64: input tokens."""
    labels: torch.Tensor
    """int64: the token that follows each input."""
    positions: torch.Tensor
    """int64: position within the trajectory."""
    group_ids: torch.Tensor
    """int64: tokens that may see each other, a prompt with its responses; -1 is padding."""
    segment_ids: torch.Tensor
    """int64: response of this microbatch, 0 to n_segments-1; -1 is a shared prompt or padding."""
    token_uid: torch.Tensor
    """int64: rollout row << 32 | input-token index; -1 is padding."""
    mask: torch.Tensor
    """bool: the label is a sampled token."""
    logp_mu: torch.Tensor
    """float32: the sampler's log-prob of the label where `mask`."""
    advantages: torch.Tensor
    """float32: advantage of the trajectory where `mask`."""
    rows: np.ndarray
    """int64 [n_segments]: rollout row of each segment."""
    routes: torch.Tensor | None
    """int64 [layers, B*L, top_k]: expert ids to replay."""
    topk_ids: torch.Tensor | None = None
    """int64 [B, L, K]: the sampler's most likely tokens where `mask`, if the rollouts have them."""
    topk_logp: torch.Tensor | None = None
    """float32 [B, L, K]: the sampler's log-probs of them; -inf where there is none."""


def pack_rows(lengths: np.ndarray, row_len: int) -> list[list[int]]:
    """Indices of `lengths` grouped into rows of at most `row_len`, first fit by decreasing length (stable)."""
    rows: list[list[int]] = []
    free: list[int] = []
    for i in np.argsort(-lengths, kind="stable"):
        need = int(lengths[i])
        for r, space in enumerate(free):
            if space >= need:
                rows[r].append(int(i))
                free[r] -= need
                break
        else:
            rows.append([int(i)])
            free.append(row_len - need)
    return rows


def microbatches(
    rollouts: Rollouts,
    advantages: np.ndarray,
    *,
    which: np.ndarray,
    row_len: int,
    max_tokens: int,
    pad_id: int,
    replay: bool,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Pack the rollout rows `which` into microbatches of at most `max_tokens` tokens.

    `advantages` is [N], or [N, R] with one a token. Raises DataError for a trajectory that is longer than a row. The
    last sampled token is a label only: no forward of the sampler saw it.
    """
    units = _units(rollouts, which, row_len)
    packed = pack_rows(np.array([_unit_len(rollouts, unit) for unit in units]), row_len)
    per_batch = max(1, max_tokens // row_len)
    for at in range(0, len(packed), per_batch):
        chunk = [[units[i] for i in row] for row in packed[at : at + per_batch]]
        yield _pack(rollouts, advantages, chunk, row_len, pad_id, replay, device)


def _units(rollouts: Rollouts, which: np.ndarray, row_len: int) -> list[list[int]]:
    """Rows of one group that are packed behind one copy of their prompt; rows of a group are neighbours in `which`."""
    units: list[list[int]] = []
    for row in which.tolist():
        if rollouts.n_input[row] > row_len:
            raise DataError(
                f"a trajectory of {rollouts.n_input[row]} tokens exceeds optim.row_len = {row_len}: raise it"
            )
        last = units[-1] if units else None
        same = last is not None and rollouts.group[last[0]] == rollouts.group[row]
        if same and _unit_len(rollouts, [*last, row]) <= row_len:
            last.append(row)
        else:
            units.append([row])
    return units


def _unit_len(rollouts: Rollouts, unit: list[int]) -> int:
    return int(rollouts.prompt_len[unit[0]]) - 1 + int(rollouts.response_len[unit].sum())


def _pack(rollouts, advantages, chunk, row_len, pad_id, replay, device) -> Microbatch:
    shape = (len(chunk), row_len)
    tokens, labels = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    positions, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    groups, segments, uid = (np.full(shape, -1, np.int64) for _ in range(3))
    logp_mu, adv = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    topk = None
    if rollouts.topk_ids is not None:
        k = rollouts.topk_ids.shape[-1]
        topk = np.zeros((*shape, k), np.int64), np.full((*shape, k), -np.inf, np.float32)
    layers, top_k = rollouts.routes.shape[2:]
    routes = np.empty((*shape, layers, top_k), np.int64)
    routes[:] = np.arange(top_k)  # padding still needs distinct experts
    rows: list[int] = []
    n_groups = 0

    def place(b: int, at: int, row: int, first: int, count: int) -> slice:
        """Input tokens `first` to `first + count - 1` of `row` at column `at` of packed row `b`."""
        span, source = slice(at, at + count), slice(first, first + count)
        tokens[b, span] = rollouts.tokens[row, source]
        positions[b, span] = np.arange(first, first + count)
        groups[b, span] = n_groups
        uid[b, span] = (row << 32) + np.arange(first, first + count)
        routes[b, span] = rollouts.routes[row, source]
        return span

    for b, units in enumerate(chunk):
        at = 0
        for unit in units:
            shared = int(rollouts.prompt_len[unit[0]]) - 1
            place(b, at, unit[0], 0, shared)
            at += shared
            for row in unit:
                n = int(rollouts.response_len[row])
                span = place(b, at, row, shared, n)
                labels[b, span] = rollouts.tokens[row, shared + 1 : shared + 1 + n]
                segments[b, span] = len(rows)
                mask[b, span] = True
                logp_mu[b, span] = rollouts.logp_mu[row, :n]
                adv[b, span] = advantages[row] if advantages.ndim == 1 else advantages[row, :n]
                if topk:
                    topk[0][b, span], topk[1][b, span] = rollouts.topk_ids[row, :n], rollouts.topk_logp[row, :n]
                rows.append(row)
                at += n
            n_groups += 1

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(a).to(device)

    by_layer = routes.reshape(-1, layers, top_k).transpose(1, 0, 2).copy() if replay else None
    return Microbatch(
        tokens=tensor(tokens),
        labels=tensor(labels),
        positions=tensor(positions),
        group_ids=tensor(groups),
        segment_ids=tensor(segments),
        token_uid=tensor(uid),
        mask=tensor(mask),
        logp_mu=tensor(logp_mu),
        advantages=tensor(adv),
        rows=np.array(rows),
        routes=None if by_layer is None else tensor(by_layer),
        topk_ids=tensor(topk[0]) if topk else None,
        topk_logp=tensor(topk[1]) if topk else None,
    )
