"""The same prompts and weights through SGLang and through the in-process engine: how their guidance differs.

A small model is warm-started and published to a real SGLang engine on this machine, which samples and records four bits
a value with its own activations beside them. The in-process engine then decodes the same tokens, and so does one whose
activations between the sites are FP32. Each record must be what its engine's activations round to; where 16 activations
of a block have the same bits in both, codes and scale must be the same, and a code must be where activation and scale
are. Prints the tables of docs/concepts/sglang_vs_inprocess.md; SGLang must be installed (docs/sglang.md).

    OMP_NUM_THREADS=1 python benches/sglang_vs_inprocess.py [--prompts 128] [--new 32] [--out figures.json]
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tracekit import config as tk
from tracekit import numerics
from tracekit.guidance import open_dataset
from tracekit.learner.calibrate import static_scales
from tracekit.learner.hf import published_tensors, save_hf
from tracekit.learner.learner import Learner
from tracekit.learner.warmstart import calibrate, warm_start
from tracekit.rollout import engine as in_process
from tracekit.rollout.cache import Capture
from tracekit.rollout.protocol import Rollouts
from tracekit.rollout.record import make_schema
from tracekit.rollout.sglang.engine import SGLangEngine
from tracekit.rollout.sglang.settings import Settings
from tracekit.tasks import CharTokenizer, load_task

CONTEXT, BLOCK = 160, 16


class Forced(in_process.InProcessEngine):
    """Decodes given responses and keeps the activations of every site, [rows, T, planes, K]."""

    def decode(self, rollouts: Rollouts, sites: list[str], temperature: float) -> Rollouts:
        """The log-probs and routes that this engine has for the tokens of `rollouts`."""
        self.seen: dict[str, torch.Tensor] = {}
        self._rows, self._at = rollouts.tokens.shape
        self.capture = Capture(sites=sites)
        prompts = [rollouts.tokens[i, :n].tolist() for i, n in enumerate(rollouts.prompt_len)]
        start, length = torch.from_numpy(rollouts.prompt_len), torch.from_numpy(rollouts.response_len)
        tokens, step = torch.from_numpy(rollouts.tokens), [0]

        def given(logits, temperature, _rng):
            rows = (length > step[0]).nonzero()[:, 0]
            logits = logits if len(logits) == len(rows) else logits[rows]
            logp = (logits / temperature).log_softmax(-1)
            chosen = tokens[rows, start[rows] + step[0]]
            step[0] += 1
            return chosen, logp.gather(-1, chosen[:, None])[:, 0], logp

        usual, in_process._sample = in_process._sample, given
        try:
            return self.generate(
                prompts, group_size=1, temperature=temperature, max_response_len=int(length.max()), seed=0
            )
        finally:
            in_process._sample = usual

    def _prefill(self, tokens, *rest):
        rows, length = tokens.shape
        self._where = (torch.arange(rows).repeat_interleave(length), torch.arange(length).repeat(rows))
        return super()._prefill(tokens, *rest)

    def _decode(self, chosen, rows, positions, *rest):
        self._where = (rows, positions)
        return super()._decode(chosen, rows, positions, *rest)

    def _scale(self, site, x, profile):
        if not site.endswith("moe_hidden"):  # its rows are an expert's, and it is not recorded
            planes = x.unsqueeze(1) if x.ndim == 2 else x
            if site not in self.seen:
                self.seen[site] = torch.full((self._rows, self._at, *planes.shape[1:]), torch.nan)
            self.seen[site][self._where] = planes
        return super()._scale(site, x, profile)


@dataclass
class Side:
    """One engine's activations [T, planes, K], codes [T, planes, K] and scales [T, planes, K/16] of a site."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


def sglang_side(data, folder: Path, names: list[str], counts: np.ndarray, site: str) -> Side:
    record = data.read_batch(names, 0, counts.tolist(), sites=[site])[site]
    x = np.concatenate([np.load(folder / f"{name}.npz")[f"{site}|x"] for name in names])
    return Side(torch.from_numpy(x), torch.from_numpy(record.codes), torch.from_numpy(record.scales))


def in_process_side(engine: Forced, rollouts: Rollouts, site: str) -> Side:
    """The prompt's rows, then the response's, of each trajectory after another."""
    kept = engine.capture.captured[site]
    prompts = [part.split(rollouts.prompt_len.tolist()) for part in kept.prompt[:2]]
    responses = [part.split((rollouts.response_len - 1).tolist()) for part in kept.response[:2]]
    codes, scales = (
        torch.cat([part for pair in zip(p, r, strict=True) for part in pair])
        for p, r in zip(prompts, responses, strict=True)
    )
    x = torch.cat([engine.seen[site][i, :n] for i, n in enumerate(rollouts.n_input)])
    return Side(x, codes, scales)


def compare(a: Side, b: Side, profile: str, scale: torch.Tensor) -> dict[str, float]:
    """Shares over all values (or blocks of 16). Raises AssertionError where a record is not its activations'."""
    for side in (a, b):  # each record is what its engine's own activations round to
        _, codes, scales = numerics.quantize_dequantize(side.x.bfloat16(), profile, global_scale=scale)
        assert torch.equal(codes.view_as(side.codes), side.codes)
        assert torch.equal(scales.view_as(side.scales), side.scales)
    same = a.x.bfloat16().view(torch.int16) == b.x.bfloat16().view(torch.int16)
    blocks = same.unflatten(-1, (-1, BLOCK)).all(-1)
    codes, scales = a.codes == b.codes, a.scales == b.scales
    decided = same & scales.repeat_interleave(BLOCK, -1)
    assert codes.unflatten(-1, (-1, BLOCK))[blocks].all() and scales[blocks].all() and codes[decided].all()
    return {
        "values": same.numel(),
        "equal_activations": share(same),
        "equal_blocks": share(blocks),
        "equal_codes": share(codes),
        "equal_low_bits": share(a.codes % 2 == b.codes % 2),
        "equal_scales": share(scales),
        "values_in_equal_blocks": int(blocks.sum()) * BLOCK,
        "equal_codes_where_blocks_are": share(codes.unflatten(-1, (-1, BLOCK))[blocks]),
        "values_of_equal_activation_and_scale": int(decided.sum()),
        "equal_codes_where_those_are": share(codes[decided]),
        "relative_difference": far(a.x, b.x),
    }


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def share(x: torch.Tensor) -> float:
    return float(x.double().mean()) if x.numel() else float("nan")


def prompts_of(kind: str, task, tokenizer, count: int) -> list[list[int]]:
    if kind == "problems":
        return [tokenizer.encode_prompt(task.eval[i].prompt) for i in range(count)]
    rng = np.random.default_rng(0)  # any tokens do: a longer way for a difference to grow
    return [[1, *rng.integers(4, tokenizer.vocab_size, n).tolist()] for n in rng.integers(60, 120, count)]


def measure(kind: str, sglang, engine, exact, settings, task, tokenizer, count: int, new: int) -> dict:
    names = [f"r{i:04d}" for i in range(count)]
    # Problems end as they do in training; the others go on to their full length, since no one samples a bos.
    sglang.eos_id = engine.eos_id = exact.eos_id = tokenizer.eos_id if kind == "problems" else tokenizer.bos_id
    prompts = prompts_of(kind, task, tokenizer, count)
    theirs = sglang.generate(
        prompts, group_size=1, temperature=1.0, max_response_len=new, topk=1, step=kind, names=names
    )
    sites = [site.name for site in settings.sites]
    ours = engine.decode(theirs, sites, 1.0)
    third_way = exact.decode(theirs, sites, 1.0)
    data, kept = open_dataset(Path(settings.folder) / kind), Path(settings.folder) / "activations" / kind
    by_site = {}
    for spec in settings.sites:
        a = sglang_side(data, kept, names, theirs.n_input, spec.name)
        b = in_process_side(engine, theirs, spec.name)
        by_site[spec.name] = compare(a, b, spec.profile, torch.tensor(settings.static_scales[spec.name]))
        third = in_process_side(exact, theirs, spec.name).x
        by_site[spec.name] |= {"sglang_to_fp32": far(a.x, third), "in_process_to_fp32": far(b.x, third)}
    sampled = theirs.sampled
    width = ours.logp_mu.shape[1]
    logp = [side.logp_mu[:, :width][sampled[:, :width]] for side in (theirs, ours, third_way)]
    differences = {"": (0, 1), "_sglang_to_fp32": (0, 2), "_in_process_to_fp32": (1, 2)}
    by_pair = {}
    for name, (i, j) in differences.items():
        d = np.abs(logp[i] - logp[j])
        by_pair |= {f"logp_difference{name}_mean": float(d.mean()), f"logp_difference{name}_max": float(d.max())}
    inputs = np.arange(theirs.tokens.shape[1]) < theirs.n_input[:, None]
    routes = [np.sort(side.routes[:, : inputs.shape[1]][inputs], -1) for side in (theirs, ours)]
    return {
        "prompts": count,
        "tokens": int(theirs.n_input.sum()),
        "sampled": int(sampled.sum()),
        "equal_routing": float((routes[0] == routes[1]).all(-1).mean()),
        **by_pair,
        "sites": by_site,
    }


def run(count: int, new: int) -> dict:
    values = {"rollout.engine": "sglang", "model.max_seq_len": CONTEXT, "guidance.bits": 4, "guidance.layers": "all"}
    config = tk.load([tk.quickstart()], values)
    torch.manual_seed(config.seed)
    task = load_task(config.task, config.seed)
    tokenizer = CharTokenizer.for_task(task)
    learner = Learner(config, tokenizer.vocab_size, device=torch.device("cpu"))
    pairs = [(tokenizer.encode_prompt(p.prompt), tokenizer.encode_response(p.answer)) for p in task.train]
    rows = {"row_len": config.optim.row_len, "pad_id": tokenizer.pad_id}
    loss = warm_start(learner, config, pairs, **rows, progress=lambda *_: None)
    scales = static_scales(calibrate(learner, pairs[:256], **rows), config.quant.headroom)
    learner.refresh()
    weights = learner.publish()
    ids = {"eos_id": tokenizer.bos_id, "pad_id": tokenizer.pad_id}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_hf(model, learner.model, config.model, tokenizer.vocab_size, weights, **ids)
        settings = Settings(
            folder=str(Path(folder) / "guidance"),
            experts=config.quant.experts,
            kv=config.quant.kv,
            static_scales={site: float(g) for site, g in scales.items()},
            sites=make_schema(config, scales).sites,
            keep_activations=True,
        )
        sglang = SGLangEngine(
            model,
            settings,
            tensors=partial(published_tensors, learner.model),
            layers=config.model.n_layers,
            top_k=config.model.top_k,
            eos_id=tokenizer.bos_id,
            context=CONTEXT,
            seed=0,
        )
        engine = Forced(config.model, config.quant, **ids, static_scales=scales)
        exact = Forced(config.model, config.quant, **ids, static_scales=scales, dtype=torch.float32)
        try:
            sglang.load(weights)
            engine.load(weights)
            exact.load(weights)
            kinds = ("problems", "random")
            out = {k: measure(k, sglang, engine, exact, settings, task, tokenizer, count, new) for k in kinds}
        finally:
            sglang.shutdown()
    return {"warm_start_loss": loss, "profiles": [config.quant.experts, config.quant.kv], **out}


def show(figures: dict) -> None:
    for kind in ("problems", "random"):
        f = figures[kind]
        print(f"\n{kind}: {f['prompts']} prompts, {f['tokens']} tokens through both, {f['sampled']} of them sampled")
        print(f"equal routing {f['equal_routing']:.4%}")
        for name in ("", "_sglang_to_fp32", "_in_process_to_fp32"):
            mean, most = (f[f"logp_difference{name}_{of}"] for of in ("mean", "max"))
            print(f"|logp difference{name}| mean {mean:.4f}, max {most:.2f}")
        print()
        columns = ("equal_activations", "equal_blocks", "equal_codes", "equal_low_bits", "equal_scales")
        columns += ("equal_codes_where_blocks_are", "equal_codes_where_those_are")
        distances = ("relative_difference", "sglang_to_fp32", "in_process_to_fp32")
        print("| site | " + " | ".join([*columns, *distances]) + " |")
        print("|---|" + "---|" * len([*columns, *distances]))
        for site, row in f["sites"].items():
            shares = " | ".join(f"{row[c]:.2%}" for c in columns)
            print(f"| {site} | {shares} | " + " | ".join(f"{row[d]:.1e}" for d in distances) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    figures = run(words.prompts, words.new)
    show(figures)
    if words.out:
        words.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
