"""Rules that join several keys. Every one is checked before anything is loaded, and none needs torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tracekit.config import fields
from tracekit.config.plan import BLOCK, W8A8, guided_layers
from tracekit.config.schema import Config
from tracekit.errors import ConfigError

BOUNDS: dict[str, tuple[float, float | None]] = {
    "steps": (0, None),
    "seed": (0, 2**32 - 1),
    "model.dim": (1, None),
    "model.n_layers": (1, None),
    "model.n_heads": (1, None),
    "model.n_kv_heads": (1, None),
    "model.head_dim": (2, None),
    "model.n_experts": (1, 256),
    "model.top_k": (1, None),
    "model.moe_hidden": (1, None),
    "model.max_seq_len": (2, None),
    "task.train_size": (1, None),
    "task.eval_size": (1, None),
    "warmstart.steps": (0, None),
    "warmstart.batch_size": (1, None),
    "rollout.prompts_per_step": (1, None),
    "rollout.group_size": (2, None),
    "rollout.max_response_len": (1, None),
    "quant.headroom": (1, None),
    "guidance.bits": (0, 4),
    "guidance.keep_steps": (-1, None),
    "guidance.byte_budget": (0, None),
    "guidance.audit_every": (0, 2**32 - 1),
    "algo.clip_ratio_low": (0, 1),
    "algo.clip_ratio_high": (0, None),
    "algo.is_cap": (1, None),
    "algo.loss_max_length": (1, None),
    "algo.kl_coef": (0, None),
    "algo.mini_steps": (1, None),
    "algo.vf_coef": (0, None),
    "algo.gae_gamma": (0, 1),
    "algo.gae_lambda": (0, 1),
    "algo.kl_reward_coef": (0, None),
    "algo.max_sampling_rounds": (1, None),
    "algo.overlong_buffer": (0, None),
    "algo.overlong_penalty": (0, None),
    "algo.x_baseline_prompts": (0, None),
    "optim.warmup_steps": (0, None),
    "optim.weight_decay": (0, None),
    "optim.beta2": (0, 1),
    "optim.decay_ratio": (0, 1),
    "optim.row_len": (2, None),
    "optim.microbatch_tokens": (1, None),
    "optim.logit_chunk_tokens": (0, None),
    "checkpoint.interval": (1, None),
    "checkpoint.keep": (1, None),
    "log.eval_interval": (0, None),
}
"""Least and greatest value of a key, both allowed; None is no limit."""

POSITIVE = (
    "model.rope_theta",
    "warmstart.lr",
    "rollout.temperature",
    "rollout.server_timeout",
    "optim.lr",
    "optim.max_grad_norm",
    "algo.critic_lr",
    "algo.value_clip",
)
"""Keys that must be greater than 0, where they are set."""


def validate(config: Config) -> None:
    """Raise ConfigError, in one line, for the first rule that `config` breaks."""
    _bounds(config)
    _run_name(config.name)
    _shapes(config)
    for problem in _blocks(config):
        raise ConfigError(problem)
    _guidance(config)
    _sglang(config)
    _algo(config)


def _bounds(config: Config) -> None:
    for key, (least, most) in BOUNDS.items():
        value = fields.get(config, key)
        if value is None:
            continue
        if value < least or (most is not None and value > most):
            allowed = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
            raise ConfigError(f"{key} = {value}: must be {allowed}")
    for key in POSITIVE:
        value = fields.get(config, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key} = {value}: must be greater than 0")


def _run_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"name = {name!r}: a run's name is letters, digits, '_', '-' and '.', not starting with a dot"
        )


def _shapes(config: Config) -> None:
    model = config.model
    if model.n_heads % model.n_kv_heads:
        raise ConfigError(
            f"model.n_heads = {model.n_heads} is not a multiple of model.n_kv_heads = {model.n_kv_heads}; "
            "query heads share key heads in equal groups"
        )
    if model.head_dim % 2:
        raise ConfigError(f"model.head_dim = {model.head_dim}: must be even, rotary embeddings turn pairs of channels")
    if model.top_k > model.n_experts:
        raise ConfigError(f"model.top_k = {model.top_k} is more than model.n_experts = {model.n_experts}; lower it")
    if config.rollout.max_response_len >= model.max_seq_len:
        raise ConfigError(
            f"rollout.max_response_len = {config.rollout.max_response_len} leaves no room for a prompt in "
            f"model.max_seq_len = {model.max_seq_len}"
        )
    if config.optim.row_len < model.max_seq_len:
        raise ConfigError(
            f"optim.row_len = {config.optim.row_len} is less than model.max_seq_len = {model.max_seq_len}; "
            "the longest prompt plus response must fit"
        )
    if config.optim.microbatch_tokens < config.optim.row_len:
        raise ConfigError(
            f"optim.microbatch_tokens = {config.optim.microbatch_tokens} is less than optim.row_len = "
            f"{config.optim.row_len}; one row must fit"
        )


def _blocks(config: Config) -> Iterator[str]:
    """One message for each quantised dimension that its profile's block does not divide."""
    dimensions = (
        ("routed experts (input)", "model.dim", "quant.experts"),
        ("routed experts (hidden)", "model.moe_hidden", "quant.experts"),
        ("attention K and V", "model.head_dim", "quant.kv"),
    )
    for module, dimension, key in dimensions:
        profile, size = fields.get(config, key), fields.get(config, dimension)
        block = BLOCK.get(profile, 1)
        if size % block:
            below, above = size // block * block, -(-size // block) * block
            near = f"{below} or {above}" if below else f"{above}"
            yield (
                f"{module}: {dimension} = {size} is not a multiple of {block}, the block of {key} = {profile!r}; "
                f'set {dimension} to {near}, or {key} to "none"'
            )


def _guidance(config: Config) -> None:
    guidance = config.guidance
    guided_layers(config)
    if len(set(guidance.sites)) != len(guidance.sites):
        raise ConfigError(f"guidance.sites = {guidance.sites}: each site once")
    if guidance.bits and not guidance.sites:
        raise ConfigError("guidance.sites is empty; name a site, or set guidance.bits to 0 for plain QAT")
    quant = config.quant
    if guidance.bits and "moe_input" in guidance.sites and quant.experts in W8A8:
        raise ConfigError(
            f"guidance.sites = {guidance.sites}: {quant.experts} experts leave no record; take moe_input out, or set "
            "guidance.bits to 0"
        )
    if quant.forward == "hardware" and quant.experts not in W8A8:
        raise ConfigError(
            f'quant.forward = "hardware" multiplies eight-bit codes, not {quant.experts}; set quant.experts to '
            f'{" or ".join(sorted(W8A8))}, or quant.forward to "emulated"'
        )


def _sglang(config: Config) -> None:
    """What the engine's plugin does not do."""
    if config.rollout.engine != "sglang":
        if config.rollout.servers:
            raise ConfigError('rollout.servers are SGLang servers: set rollout.engine = "sglang"')
        if config.rollout.kv_pool == "packed":
            raise ConfigError('rollout.kv_pool is of SGLang\'s cache: set rollout.engine = "sglang"')
        return
    if config.rollout.kv_pool == "packed" and config.quant.kv != "nvfp4-exact":
        raise ConfigError(f'rollout.kv_pool = "packed" holds quant.kv = "nvfp4-exact", not {config.quant.kv!r}')
    for url in config.rollout.servers:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            raise ConfigError(f"rollout.servers: {url!r} is not an address such as http://127.0.0.1:30000")
    if config.rollout.servers and config.rollout.sglang:
        raise ConfigError("rollout.sglang is for an engine of this machine; give them to `tracekit serve`")
    if config.quant.experts in W8A8:
        raise ConfigError(
            f"quant.experts = {config.quant.experts!r}: the SGLang plugin rounds to four bits; use rollout.engine = "
            '"in_process"'
        )
    if config.quant.global_scale == "token":
        raise ConfigError(
            'quant.global_scale = "token": the SGLang plugin rounds under static scales; set it to "static"'
        )
    if config.guidance.bits and config.guidance.mode == "scale_only":
        raise ConfigError('guidance.mode = "scale_only": the SGLang plugin records codes; set it to "codes"')


def _algo(config: Config) -> None:
    prompts = config.rollout.prompts_per_step
    if config.algo.mini_steps > prompts:
        raise ConfigError(
            f"algo.mini_steps = {config.algo.mini_steps} is more than rollout.prompts_per_step = {prompts}; "
            "a mini-step takes whole groups"
        )
    for key, known in _objective_names().items():
        if (value := fields.get(config, key)).partition(":")[0] not in known:
            raise ConfigError(f"{key} = {value!r}: expected one of {', '.join(known)}")
    _algo_data(config)


def _algo_data(config: Config) -> None:
    """Rules between [algo] and what is sampled."""
    algo, rollout = config.algo, config.rollout
    if algo.overlong_buffer > rollout.max_response_len:
        raise ConfigError(
            f"algo.overlong_buffer = {algo.overlong_buffer} is more than rollout.max_response_len = "
            f"{rollout.max_response_len}; the penalty grows over the last tokens of a response"
        )
    if algo.x_baseline_prompts > config.task.eval_size:
        raise ConfigError(
            f"algo.x_baseline_prompts = {algo.x_baseline_prompts} is more than task.eval_size = {config.task.eval_size}"
        )
    gae = algo.advantage == "gae" or (algo.advantage is None and algo.name == "ppo")
    if algo.kl_reward_coef and not gae:
        raise ConfigError(
            f"algo.kl_reward_coef = {algo.kl_reward_coef}: only gae has rewards a token; use algo.kl_coef, or "
            'algo.advantage = "gae"'
        )


def _objective_names() -> dict[str, tuple[str, ...]]:
    """Known surrogates and corrections, read from the registry's source: importing it would import torch."""
    spec = importlib.util.find_spec("tracekit.objectives")
    path = Path(spec.submodule_search_locations[0]) / "registry.py"
    wanted, found = {"_LOSSES": "algo.name", "_CORRECTIONS": "algo.correction"}, {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in wanted:
                    found[wanted[target.id]] = tuple(ast.literal_eval(node.value))
    return found
