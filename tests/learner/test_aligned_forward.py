"""W8A8 experts in a run: products of codes (QaRL's aligned forward) beside the emulated ones."""

import loop_fixtures
import pytest
import torch
from test_train import steps, train

from tracekit import numerics
from tracekit.learner.guide import Guide, guided
from tracekit.learner.guided import EXPERT_WEIGHTS
from tracekit.learner.warmstart import warm_start

W8A8 = ["int8", "fp8-e4m3"]
FLAGS = ["--guidance.bits", "0", "--quant.kv", "none"]


def built(out, profile, forward, *more):
    return loop_fixtures.build(out, *FLAGS, "--quant.experts", profile, "--quant.forward", forward, *more)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("profile", W8A8)
def test_both_forwards_are_one_function(tmp_path, profile):
    """Same weights, same rollouts: log-probs and gradients differ by the rounding of sums in FP32, hundreds of times
    less than by what W8A8 does to them. Both give every expert's weight a gradient.
    """
    a, b = (built(tmp_path / forward, profile, forward) for forward in ("emulated", "hardware"))
    plain = loop_fixtures.build(tmp_path / "plain", *FLAGS, "--quant.experts", "none")
    x = loop_fixtures.opened(a)
    grads, logp = [], []
    for run in (a, b, plain):
        run.learner.model.load_state_dict(a.learner.model.state_dict())
        run.learner.refresh()
        found, _ = loop_fixtures.gradients(run, x)
        grads.append(torch.cat([found[n].flatten() for n in sorted(found)]))
        batch = next(run.loop.update.batches(x.rollouts, x.advantages, torch.arange(len(x.rewards)).numpy()))
        with torch.no_grad():
            logp.append(run.learner.logp(batch, run.loop.update.guide(batch, x), temperature=1.0)[0][batch.mask])
        experts = [n for n in found if n.endswith(EXPERT_WEIGHTS)]
        assert len(experts) == 6 and all(found[n].abs().sum() > 0 for n in experts)
    assert (logp[1] - logp[0]).abs().mean() < 1e-2 * (logp[2] - logp[0]).abs().mean()
    assert distance(grads[1], grads[0]) < 1e-2 * distance(grads[2], grads[0])


@pytest.mark.parametrize("profile", W8A8)
def test_the_product_multiplies_the_published_codes(tmp_path, profile):
    """An expert's forward against FP64 over what is published, activations rounded once a token."""
    run = built(tmp_path, profile, "hardware")
    name, experts = next(iter(run.learner.experts.items()))
    weights = [run.learner.publish().experts[f"{name}.{w}"].dequantize(torch.float64) for w in EXPERT_WEIGHTS]
    x = torch.randn(6, 64)
    counts = torch.zeros(8, dtype=torch.int64)
    counts[3] = 6
    with torch.no_grad(), guided(Guide(profiles={}, static_scales=None)):
        out = experts(x, counts)

    def rounded(t):
        return numerics.quantize(t.float(), profile).dequantize(torch.float64)

    w1, w2, w3 = (w[3] for w in weights)
    hidden = torch.nn.functional.silu(rounded(x) @ w1.t()) * (rounded(x) @ w3.t())
    assert distance(out, rounded(hidden) @ w2.t()) < 2e-3  # a value at a rounding boundary may go either way


def test_checkpointing_and_compilation(tmp_path):
    """Recomputation gives the same gradients, and the graph captures whole through the operators' meta functions."""
    from torch.utils.checkpoint import checkpoint

    run = built(tmp_path, "int8", "hardware")
    experts = next(iter(run.learner.experts.values()))
    x = torch.randn(12, 64, requires_grad=True)
    counts = torch.tensor([3, 0, 2, 1, 0, 4, 1, 1])
    tensors = [x, *(getattr(experts, w) for w in EXPERT_WEIGHTS)]

    def gradients(forward):
        return torch.autograd.grad(forward(x, counts).square().sum(), tensors)

    plain = gradients(experts)
    again = gradients(lambda *a: checkpoint(experts, *a, use_reentrant=False))
    compiled = gradients(torch.compile(experts.forward, backend="aot_eager", fullgraph=True))
    for a, b, c in zip(plain, again, compiled, strict=True):
        assert torch.equal(a, b) and distance(c, a) < 1e-5


@pytest.mark.parametrize("profile", W8A8)
def test_supervised_loss_falls_alike(tmp_path, profile):
    """Thirty steps of the warm start from the same weights: both forwards learn, with losses within 1 %."""
    curves = {}
    for forward in ("emulated", "hardware"):
        more = (
            "--warmstart.steps",
            "30",
            "--warmstart.batch-size",
            "32",
            "--model.max-seq-len",
            "64",
            "--optim.row-len",
            "64",
        )
        run = built(tmp_path / forward, profile, forward, *more)
        problems = (run.task.train[i] for i in range(200))
        pairs = [(run.tokenizer.encode_prompt(p.prompt), run.tokenizer.encode_response(p.answer)) for p in problems]
        losses = curves[forward] = []
        warm_start(
            run.learner, run.config, pairs, row_len=64, pad_id=run.tokenizer.pad_id,
            progress=lambda _, loss, losses=losses: losses.append(float(loss)),
        )  # fmt: skip
    a, b = (torch.tensor(curves[f]) for f in ("emulated", "hardware"))
    assert len(a) == 30 and a[-3:].mean() < 0.8 * a[:3].mean() and b[-3:].mean() < 0.8 * b[:3].mean()
    assert ((a - b).abs() / a).max() < 0.01


@pytest.mark.parametrize("forward", ["emulated", "hardware"])
def test_a_run_trains(tmp_path, forward):
    """Four steps of TBPO on INT8 experts: sampler and learner agree, nothing is recorded, gradients are finite."""
    flags = [*FLAGS, "--quant.experts", "int8", "--quant.forward", forward, "--algo.name", "tbpo"]
    assert train(tmp_path, "--algo.correction", "none", *flags) == 0
    lines = steps(tmp_path)
    assert sorted(lines) == [1, 2, 3, 4]
    for line in lines.values():
        assert line["policy/nonfinite_tokens"] == 0 and line["mismatch/logprob_abs_diff_mean"] < 0.1
        assert "guidance/bytes_per_token" not in line
    assert any(line["actor/grad_norm"] > 0 for line in lines.values())
