"""The learner's model as a Hugging Face folder (qwen3_moe), and back, through torchtitan's state-dict adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tracekit import numerics
from tracekit.config.schema import ModelConfig
from tracekit.errors import DataError
from tracekit.learner.model import NORM_EPS  # installs the compat patches first

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter  # isort: skip

from tracekit.rollout.protocol import PublishedWeights

WEIGHTS = "model.safetensors"


def hf_config(config: ModelConfig, vocab_size: int, *, eos_id: int, pad_id: int) -> dict[str, Any]:
    """`config.json` of the model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.moe_hidden,
        "moe_intermediate_size": config.moe_hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
    }


def published_tensors(model: nn.Module, weights: PublishedWeights) -> dict[str, torch.Tensor]:
    """BF16 tensors by Hugging Face name. Quantised experts are their values: a value of E2M1 times a block scale has
    few significant bits, and with a power of two as global scale BF16 holds it exactly.

    Raises DataError where it does not.
    """
    state = dict(weights.dense)
    for name, w in weights.experts.items():
        value = w.dequantize(torch.float32) if isinstance(w, numerics.Quantized) else w.float()
        state[name] = value.bfloat16()
        if isinstance(w, numerics.Quantized) and not torch.equal(state[name].float(), value):
            raise DataError(f"{name}: BF16 does not hold its quantised values; publish with power-of-two scales")
    return Qwen3StateDictAdapter(model.config, None).to_hf(state)


def save_hf(
    folder: Path, model: nn.Module, config: ModelConfig, vocab_size: int, weights: PublishedWeights, *, eos_id, pad_id
) -> None:
    """Write `config.json` and `model.safetensors` of published weights; an engine starts from such a folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(hf_config(config, vocab_size, eos_id=eos_id, pad_id=pad_id), indent=2)
    (folder / "config.json").write_text(text + "\n")
    tensors = {name: t.contiguous().cpu() for name, t in published_tensors(model, weights).items()}
    partial = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)


def load_hf(folder: Path, model: nn.Module) -> None:
    """Load weights of a Hugging Face folder into `model`. Raises DataError when they are another model's."""
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no *.safetensors: give a Hugging Face model folder")
    for path in files:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    adapter = Qwen3StateDictAdapter(model.config, None)
    wanted = adapter.to_hf(model.state_dict())
    for name, tensor in wanted.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = "missing" if name not in tensors else f"of shape {tuple(tensors[name].shape)}"
            raise DataError(f"{folder}: {name} is {found}, the model wants {tuple(tensor.shape)}; see [model]")
    state = adapter.from_hf({name: tensors[name].float() for name in wanted})
    model.load_state_dict(state)
