"""Supervised training before RL, so that rewards exist to learn from; cached by everything it depends on."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tracekit.config.schema import Config
from tracekit.learner.calibrate import calibration_guide, profiles
from tracekit.learner.guide import Guide, guided
from tracekit.learner.learner import Learner
from tracekit.learner.logprobs import chunks
from tracekit.learner.packing import Microbatch, pack_rows

MAX_GRAD_NORM = 1.0


def supervised_batch(pairs: list[tuple[list[int], list[int]]], *, row_len: int, pad_id: int, device) -> Microbatch:
    """Pack (prompt, response) token pairs; the mask covers each response."""
    sequences = [prompt + response for prompt, response in pairs]
    rows = pack_rows(np.array([len(s) - 1 for s in sequences]), row_len)
    shape = (len(rows), row_len)
    tokens, labels = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    positions, groups, mask = np.zeros(shape, np.int64), np.full(shape, -1, np.int64), np.zeros(shape, bool)
    for b, members in enumerate(rows):
        at = 0
        for i in members:
            seq, n = sequences[i], len(sequences[i]) - 1
            tokens[b, at : at + n], labels[b, at : at + n] = seq[:-1], seq[1:]
            positions[b, at : at + n], groups[b, at : at + n] = np.arange(n), i
            mask[b, at + len(pairs[i][0]) - 1 : at + n] = True
            at += n

    def tensor(a):
        return torch.from_numpy(a).to(device)

    zeros = torch.zeros(shape, device=device)
    unused = torch.full(shape, -1, dtype=torch.int64, device=device)
    return Microbatch(
        tokens=tensor(tokens),
        labels=tensor(labels),
        positions=tensor(positions),
        group_ids=tensor(groups),
        segment_ids=unused,
        token_uid=unused,
        mask=tensor(mask),
        logp_mu=zeros,
        advantages=zeros,
        rows=np.arange(len(pairs)),
        routes=None,
    )


def warm_start(learner: Learner, config: Config, pairs, *, row_len: int, pad_id: int, progress) -> float:
    """Train on `pairs` (prompt and response token lists), drawn with replacement. Returns the last loss.

    Plain QAT: the forward rounds as the RL phase's will, under a scale from each token, since no static scale is
    known before there are activations to calibrate on.
    """
    w = config.warmstart
    learner.start(lr=w.lr, steps=w.steps, warmup_steps=max(1, w.steps // 20), decay_ratio=0.5)
    rng = np.random.default_rng(config.seed)
    guide = Guide(profiles=profiles(config), static_scales=None)
    loss = float("nan")
    for step in range(w.steps):
        chosen = rng.integers(len(pairs), size=w.batch_size)
        batch = supervised_batch([pairs[i] for i in chosen], row_len=row_len, pad_id=pad_id, device=learner.device)
        loss = _backward(learner, batch, guide)
        learner.optimizer_step(MAX_GRAD_NORM)
        progress(step + 1, loss)
    return loss


def _backward(learner: Learner, batch: Microbatch, guide: Guide) -> float:
    """Mean negative log-prob of the masked labels, and its gradient; by chunks of `optim.logit_chunk_tokens`."""
    size = learner.config.optim.logit_chunk_tokens
    with guided(guide):
        if not size:
            value = F.cross_entropy(learner.logits(batch)[batch.mask], batch.labels[batch.mask])
            value.backward()
            return float(value.detach())
        pieces = chunks(batch.mask, size)
        own = learner.hidden(batch).flatten(0, 1)[torch.cat(pieces)]
        total, gradients = 0.0, []
        for piece, hidden in zip(pieces, own.split(size), strict=True):
            leaf = hidden.detach().requires_grad_()
            value = -learner.piece_logprobs(leaf, batch, piece, temperature=1.0).logp.sum() / len(own)
            value.backward()
            total += float(value.detach())
            gradients.append(leaf.grad)
        own.backward(torch.cat(gradients))
    return total


@torch.no_grad()
def calibrate(learner: Learner, pairs, *, row_len: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Largest magnitude of each site over `pairs`."""
    guide = calibration_guide()
    batch = supervised_batch(pairs, row_len=row_len, pad_id=pad_id, device=learner.device)
    guide.real = (batch.group_ids >= 0).reshape(-1)
    with guided(guide):
        learner.hidden(batch)
    return guide.amax
