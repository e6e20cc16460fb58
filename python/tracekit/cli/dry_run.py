"""`tracekit train --dry-run`: what a configuration would do, without a model and without training."""

from __future__ import annotations

from collections import Counter

from tracekit import config as tk
from tracekit.config import fields
from tracekit.config.dump import toml_value
from tracekit.config.plan import Site
from tracekit.guidance import SiteSpec
from tracekit.tasks import CharTokenizer, check_fits, load_task


def describe(loaded: tk.Loaded) -> str:
    """The resolved configuration with sources, the quantisation plan and the size of the guidance."""
    config = loaded.config
    return "\n".join(
        [
            "resolved configuration (values that are not the default name their source)",
            *_resolved(loaded),
            "",
            "quantisation plan",
            *_plan(config),
            "",
            "guidance",
            *_guidance(config),
        ]
    )


def _resolved(loaded: tk.Loaded) -> list[str]:
    lines = []
    for section in fields.sections(tk.Config):
        for leaf in section.leaves:
            prefix = f"{leaf.path}."
            keys = {key: source for key, source in loaded.sources.items() if key == leaf.path or key.startswith(prefix)}
            text = f"  {leaf.path} = {toml_value(fields.get(loaded.config, leaf.path))}"
            lines.append(f"{text:<52}  <- {', '.join(dict.fromkeys(keys.values()))}" if keys else text)
    return lines


def _plan(config: tk.Config) -> list[str]:
    model, sites = config.model, tk.plan(config)
    experts, kv = config.quant.experts, config.quant.kv
    count = model.n_layers * model.n_experts * 3 if experts != "none" else 0
    lines = [
        f"  expert weights   {count} matrices of {model.n_layers} layers: {experts}",
        f"  K and V          {2 * model.n_layers if kv != 'none' else 0} sites of {model.n_layers} layers: {kv}",
        "  everything else  embedding, attention projections, router, norms, output: not quantised",
    ]
    if sites:
        lines.append(f"  {'site':<22}{'profile':<14}{'rows':>5}{'width':>7}{'block':>7}  recorded")
    lines += [_site(site) for site in sites]
    return lines


def _site(site: Site) -> str:
    recorded = f"{site.bits} bit, {site.bytes_per_token} B/token" if site.scales else "-"
    return f"  {site.name:<22}{site.profile:<14}{site.planes:>5}{site.width:>7}{site.block:>7}  {recorded}"


def _guidance(config: tk.Config) -> list[str]:
    sites = tk.guided_sites(config)
    prompt, answer = _lengths(config)
    if not sites:
        why = "guidance.bits is 0" if config.guidance.bits == 0 else "none of guidance.sites is quantised"
        return [f"  nothing is recorded: {why}"]
    lines, rollout = [], config.rollout
    unquantised = {name for name in config.guidance.sites if not any(site.name.endswith(f".{name}") for site in sites)}
    if unquantised:
        lines.append(f"  not recorded, because not quantised: {', '.join(sorted(unquantised))}")
    per_token = sum(site.bytes_per_token for site in sites)
    values = sum(site.planes * site.width for site in sites)
    kinds = Counter(site.name.rpartition(".")[2] for site in sites)
    responses = rollout.prompts_per_step * rollout.group_size
    prompts = rollout.prompts_per_step * prompt
    likely, most = (prompts + responses * (length - 1) for length in (answer, rollout.max_response_len))
    lines += [
        f"  sites            {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}",
        f"  per token        {per_token} B for {values} values, {8 * per_token / values:.2f} bit a value, before "
        "the scales are compressed",
        *_encoded(config, sites),
        f"  per step         {_size(likely * per_token)} if responses are as long as answers ({answer:.1f} tokens), at "
        f"most {_size(most * per_token)}",
        f"                   {rollout.prompts_per_step} prompts of {prompt:.1f} tokens once each, {responses} "
        "responses without their last token; headers come on top, and weigh on short responses",
        f"  on disk          {_kept(config, most * per_token)}",
    ]
    return lines


def _encoded(config: tk.Config, sites: list[Site]) -> list[str]:
    """What an encoding other than lossless saves; rows that are too narrow to gain stay lossless."""
    encoding = config.guidance.encoding
    if encoding == "lossless":
        return []
    specs = [
        SiteSpec(name=s.name, planes=s.planes, width=s.width, profile=s.profile, block=s.block, bits=s.bits)
        for s in sites
    ]
    stored = [spec.resolve(encoding) for spec in specs]
    size = sum(s.planes * (s.stored_code_row + s.stored_scale_row + 2 * s.n_checks) for s in stored)
    gain = sum(s.encoding != "lossless" for s in stored)
    return [f"  encoding         {gain} of {len(stored)} sites are wide enough for {encoding}: {size} B per token"]


def _lengths(config: tk.Config) -> tuple[float, float]:
    """Mean tokens of a prompt and of an answer with its EOS, measured on the task; refuses a task that cannot fit."""
    task = load_task(config.task, config.seed)
    return check_fits(task, CharTokenizer.for_task(task), config)


def _kept(config: tk.Config, per_step: int) -> str:
    keep, budget = config.guidance.keep_steps, config.guidance.byte_budget
    if budget:
        return f"at most {_size(budget)} (guidance.byte_budget); checkpoints come early where a step would not fit"
    if keep < 0:
        return f"at most {_size(per_step * config.steps)}, all {config.steps} steps are kept"
    return f"at most {_size(per_step * min(config.steps, keep + 1))}, {keep} steps stay after the current one"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
