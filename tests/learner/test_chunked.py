"""Chunked logits: the same loss and gradient as whole ones, and no whole [tokens, vocabulary] anywhere."""

import numpy as np
import pytest
import torch
from loop_fixtures import build, gradients, opened
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracekit.learner.guide import Guide
from tracekit.learner.warmstart import _backward, supervised_batch

CHUNK = 9
METHODS = {
    "grpo + tis": (),
    "kl and entropy": ("--algo.kl-coef", "0.1", "--algo.entropy-coef", "0.05"),
    "gspo": ("--algo.name", "gspo", "--algo.clip-ratio-high", "0.2", "--algo.clip-ratio-low", "0.2"),
    "tbpo": ("--algo.name", "tbpo", "--algo.correction", "none"),
    "opsm": ("--algo.correction", "opsm", "--algo.denominator", "surviving"),
    "score centering": (
        "--algo.name",
        "reinforce",
        "--algo.correction",
        "score_centering",
        "--algo.knobs.sc_topk",
        "5",
    ),
    "shared critic": ("--algo.name", "ppo", "--algo.critic", "shared"),
}


@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_are_those_of_whole_logits(tmp_path, method):
    found = []
    for chunk in (0, CHUNK):
        built = build(tmp_path / str(chunk), *METHODS[method], "--optim.logit-chunk-tokens", str(chunk))
        x = opened(built)
        with torch.no_grad():  # move away from logp_old, so that ratios are not 1
            for p in built.learner.model.parameters():
                p.mul_(1 + 0.01 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view_as(p))
            if built.critic is not None:
                built.critic.head.weight.add_(0.05)
        built.learner.refresh()
        found.append((x, *gradients(built, x)))
    (a, grads, outs), (b, chunked, chunked_outs) = found
    for name, table in a.tokens.values.items():
        np.testing.assert_allclose(b.tokens.values[name], table, atol=2e-6, err_msg=name)
    losses, chunked_losses = ([float(o.loss.detach()) for o in each] for each in (outs, chunked_outs))
    assert len(losses) > 1 and losses == pytest.approx(chunked_losses, rel=1e-4, abs=1e-6)
    assert sorted(grads) == sorted(chunked)
    assert sum(float(g.abs().sum()) for g in grads.values()) > 0
    for name, gradient in grads.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(chunked[name], gradient, atol=1e-6 + 2e-4 * scale, rtol=1e-3, msg=name)


def test_the_warm_start_is_chunked_too(tmp_path):
    found = {}
    for chunk in (0, CHUNK):
        built = build(tmp_path / str(chunk), "--optim.logit-chunk-tokens", str(chunk))
        t = built.tokenizer
        problems = [built.task.train[i] for i in range(40)]
        pairs = [(t.encode_prompt(p.prompt), t.encode_response(p.answer)) for p in problems]
        pairs = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= 32]
        batch = supervised_batch(pairs, row_len=48, pad_id=t.pad_id, device=built.learner.device)
        with LargestLogits(t.vocab_size, built.config.model.dim) as largest:
            loss = _backward(built.learner, batch, Guide(profiles={}, static_scales=None))
        gradients = {n: p.grad for n, p in built.learner.model.named_parameters() if p.grad is not None}
        found[chunk] = loss, gradients, largest.rows
    (loss, whole, rows), (chunked_loss, chunked, chunked_rows) = found.values()
    assert loss == pytest.approx(chunked_loss, rel=1e-5) and rows > 64 and chunked_rows <= CHUNK
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor made whose last dimension is the vocabulary, weights of the head aside."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.vocabulary, self.width, self.rows = vocabulary, width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == self.vocabulary:
                rows = t.numel() // self.vocabulary
                if rows != self.width:
                    self.rows = max(self.rows, rows)
        return out


@pytest.mark.parametrize("method", ["grpo + tis", "tbpo", "score centering", "kl and entropy"])
def test_no_logits_are_whole(tmp_path, method):
    seen = {}
    for chunk in (0, CHUNK):
        built = build(tmp_path / str(chunk), *METHODS[method], "--optim.logit-chunk-tokens", str(chunk))
        vocabulary = built.tokenizer.vocab_size
        assert vocabulary not in (5, 9, 32, 48, 64, 2, 4, 8)  # no other dimension has its size
        x = opened(built)
        with LargestLogits(vocabulary, built.config.model.dim) as largest:
            built.loop.update.open(x)
            built.loop.update.mini_step(x, np.arange(len(x.rewards)))
        seen[chunk] = largest.rows
    assert seen[0] >= 96 and 0 < seen[CHUNK] <= CHUNK, seen
