"""The run's model as a torchtitan config: Qwen3-style attention and a mixture of experts in every layer."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from tracekit.config.schema import ModelConfig
from tracekit.learner import compat

compat.install()

from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.config_utils import (  # noqa: E402
    get_attention_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402

from tracekit.learner.guided import GuidedConverter, GuidedGroupedExperts  # noqa: E402

NORM_EPS = 1e-6


def _normal(std: float) -> dict:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


def _norm(dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=NORM_EPS, param_init={"weight": nn.init.ones_})


def model_config(config: ModelConfig, vocab_size: int) -> Qwen3Model.Config:
    """torchtitan config of the model, with the guided modules swapped in. Weights start at std 1/sqrt(fan in)."""
    dim, hidden = config.dim, config.moe_hidden
    fan = 1 / math.sqrt(dim)
    residual = 1 / math.sqrt(2 * config.n_layers)
    attention_out = config.n_heads * config.head_dim
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=_norm(dim),
            ffn_norm=_norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=config.n_heads,
                n_kv_heads=config.n_kv_heads,
                head_dim=config.head_dim,
                wqkv_param_init=_normal(fan),
                wo_param_init=_normal(residual / math.sqrt(attention_out)),
                inner_attention=get_attention_config("varlen"),
                fuse_qkv=False,
                rope=CosSinRoPE.Config(dim=config.head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta),
                qk_norm=_norm(config.head_dim),
            ),
            moe=make_moe_config(
                num_experts=config.n_experts,
                load_balance_coeff=None,  # a bias that drifts from the sampler's would undo routing replay
                router=make_router_config(
                    dim=dim,
                    num_experts=config.n_experts,
                    gate_param_init=_normal(fan),
                    top_k=config.top_k,
                    score_func="softmax",
                    route_norm=True,
                ),
                routed_experts=make_routed_experts_config(
                    dim=dim,
                    hidden_dim=hidden,
                    num_experts=config.n_experts,
                    top_k=config.top_k,
                    param_init={
                        "w1_EFD": partial(nn.init.normal_, std=fan),
                        "w3_EFD": partial(nn.init.normal_, std=fan),
                        "w2_EDF": partial(nn.init.normal_, std=residual / math.sqrt(hidden)),
                    },
                    comm_backend="standard",
                ),
            ),
        )
        for _ in range(config.n_layers)
    ]
    tree = Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=_norm(dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init={"weight": partial(nn.init.normal_, std=1.0)}
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_normal(fan)),
        layers=layers,
    )
    return GuidedConverter.Config().build().convert(tree)


def build_model(config: ModelConfig, vocab_size: int, *, seed: int, device: torch.device) -> Qwen3Model:
    """A model with fresh FP32 weights that depend on `seed` alone."""
    tree = model_config(config, vocab_size)
    tree.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig()))
    with torch.device("meta"):
        model = tree.build()
    model.verify_module_protocol()
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        model.init_weights(buffer_device=None)
    return model.train()


def experts_of(model: nn.Module) -> dict[str, GuidedGroupedExperts]:
    """Routed experts by their name in the model."""
    return {name: m for name, m in model.named_modules() if isinstance(m, GuidedGroupedExperts)}
