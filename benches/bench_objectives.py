"""What an objective costs, given the log-probs, against a training step.

    python benches/bench_objectives.py [--tokens 8192] [--device cpu] [--json FILE]

A training step here is forward, backward and AdamW of a small dense transformer on the same tokens (a stand-in).
Reported: each method's loss and its backward to logp, its difference to plain GRPO as a share of the step, ACRL's
weights alone, metrics apart, and what only some methods need: the second pass over chunked logits, the reference's
forward, the critic.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

from tracekit.objectives import LossBatch, policy_loss
from tracekit.objectives.gae import value_loss
from tracekit.objectives.terms import Terms
from tracekit.objectives.two_pass import LogProbs, two_pass_backward

METHODS = {
    "grpo": dict(name="grpo"),
    "grpo + tis (TRACE)": dict(name="grpo", correction="tis"),
    "ppo": dict(name="ppo", advantage="grpo"),
    "dr_grpo": dict(name="dr_grpo", loss_max_length=1024),
    "dapo": dict(name="dapo"),
    "gspo": dict(name="gspo"),
    "cispo": dict(name="cispo"),
    "tbpo": dict(name="tbpo"),
    "reinforce": dict(name="reinforce"),
    "minirl + tis": dict(name="minirl", correction="tis"),
    "dppo_tv": dict(name="dppo_tv"),
    "grpo + mis": dict(name="grpo", correction="mis"),
    "grpo + icepop": dict(name="grpo", correction="icepop"),
    "grpo + token_rejection": dict(name="grpo", correction="token_rejection"),
    "grpo + sequence_rejection": dict(name="grpo", correction="sequence_rejection"),
    "grpo + acrl": dict(name="grpo", correction="acrl", x_reference=0.01),
    "grpo + qurl": dict(name="grpo", correction="qurl"),
    "grpo + opsm": dict(name="grpo", correction="opsm"),
}


class Model(nn.Module):
    """Pre-norm transformer encoder with a causal mask, a language-model head and a value head."""

    def __init__(self, width: int, layers: int, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.value = nn.Linear(width, 1)

    def hidden(self, ids):
        """ids [N, T] → [N, T, width]"""
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.body(self.embed(ids), mask=causal, is_causal=True)


def timed(f, device, repeats):
    """Median seconds of f."""
    f()
    took = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def token_logp(logits, ids):
    """[…, V], […] → […]"""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def main():
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocab", type=int, default=8192)
    p.add_argument("--chunks", type=int, default=8)
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--device", default="cpu")
    p.add_argument("--json")
    a = p.parse_args()
    device = torch.device(a.device)
    torch.manual_seed(0)
    n = a.tokens // a.length
    model = Model(a.width, a.layers, a.vocab).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, a.vocab, (n, a.length), device=device)
    base = -torch.rand(n, a.length, device=device).exp()
    batch = LossBatch(
        logp=(base + 0.01 * torch.randn_like(base)).requires_grad_(),
        logp_old=base,
        logp_mu=base + 0.05 * torch.randn_like(base),
        advantages=torch.randn(n, 1, device=device).expand_as(base),
        mask=torch.rand(n, a.length, device=device) > 0.1,
        group=torch.arange(n, device=device) // 8,
    )
    slow = max(a.repeats // 3, 3)

    def step():
        logp = token_logp(model.head(model.hidden(ids)), ids)
        (-(logp * batch.mask).sum() / a.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = timed(step, device, slow)
    out = {"step_s": whole, "tokens": a.tokens, "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(f"{a.tokens} tokens, {n} responses, {device}, {out['threads']} threads, torch {torch.__version__}")
    size = sum(x.numel() for x in model.parameters()) / 1e6
    print(f"training step (stand-in, {size:.0f} M parameters)  {whole * 1e3:9.1f} ms")

    def call(objective):
        def run():
            torch.autograd.grad(objective(batch).loss, batch.logp)

        return run

    times = {m: timed(call(policy_loss(metric_level="basic", **k)), device, a.repeats) for m, k in METHODS.items()}
    full = timed(call(policy_loss("grpo")), device, a.repeats)
    print(f"\n{'loss, backward to logp, basic metrics':38s} {'ms':>8s} {'of step':>8s} {'over grpo':>10s}")
    for m, t in times.items():
        over = (t - times["grpo"]) / whole
        print(f"{m:38s} {t * 1e3:8.2f} {t / whole:8.2%} {over:10.2%}")
    print(
        f"{'grpo with full metrics':38s} {full * 1e3:8.2f} {full / whole:8.2%} {(full - times['grpo']) / whole:10.2%}"
    )

    acrl = policy_loss("grpo", correction="acrl", x_reference=0.01)
    terms = Terms.build(batch, whole_responses=False)
    weights = timed(lambda: acrl.correction(terms, acrl.state), device, a.repeats)
    print(f"\nACRL's weights alone                   {weights * 1e3:8.2f} {weights / whole:8.2%}")

    gspo = policy_loss("gspo", metric_level="basic")
    hidden = model.hidden(ids).detach().reshape(-1, a.width)
    flat = ids.reshape(-1)
    pieces = [slice(int(c[0]), int(c[-1]) + 1) for c in torch.arange(a.tokens).chunk(a.chunks)]

    def logprobs(piece):
        return LogProbs(logp=token_logp(model.head(hidden[piece]), flat[piece]))

    def one_pass():
        for piece in pieces:
            logprobs(piece).logp.sum().backward()

    once = timed(one_pass, device, slow)
    twice = timed(lambda: two_pass_backward(gspo, batch, pieces, logprobs), device, slow)

    def reference():
        with torch.no_grad():
            token_logp(model.head(model.hidden(ids)), ids)

    def critic():
        v = model.value(hidden)[:, 0].reshape(n, a.length)
        value_loss(batch.with_(values=v, values_old=base, returns=base + 1)).loss.backward()

    ref, val = timed(reference, device, slow), timed(critic, device, slow)
    apart = {"second pass over the head": twice - once, "reference forward": ref, "critic (value head)": val}
    for m, t in apart.items():
        print(f"{m:38s} {t * 1e3:8.2f} {t / whole:8.2%}")
    out |= {"loss_s": times, "grpo_full_metrics_s": full, "acrl_weights_s": weights, "apart_s": apart}
    if a.json:
        with open(a.json, "w") as f:
            json.dump(out, f, indent=1)


if __name__ == "__main__":
    main()
