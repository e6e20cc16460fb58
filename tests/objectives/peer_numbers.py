"""Losses and gradients of public libraries on one batch, for `test_peers.py`.

    python tests/objectives/peer_numbers.py tests/golden/objectives_peers.json

needs `trl` and `verl` (any versions that still have the functions named here; those used are written into the file).
Their own code runs: TRL's loss method on a stand-in trainer and the piece of its source that makes the importance
ratios, verl's functions by name.
"""

import inspect
import json
import math
import sys
import textwrap
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace

import torch

LENGTHS = (7, 4, 6, 1, 5, 7)
TOKEN_TENSORS = ("logp", "logp_old", "logp_mu", "logp_ref")


def inputs() -> dict:
    """Six ragged responses, two prompts, ratios wide enough to clip; plain numbers."""
    g = torch.Generator().manual_seed(11)

    def noise(scale):
        return scale * torch.randn(6, 7, generator=g, dtype=torch.float64)

    mu = -0.05 - noise(1.0).abs()
    old = (mu + noise(0.4)).clamp(max=-1e-3)
    data = {"logp_mu": mu, "logp_old": old, "logp": (old + noise(0.4)).clamp(max=-1e-3), "logp_ref": old + noise(0.2)}
    data = {k: v.tolist() for k, v in data.items()}
    data["mask"] = [[j < n for j in range(7)] for n in LENGTHS]
    data["advantages"] = [0.9, -1.3, 0.4, 0.7, -0.2, -0.5]
    data["rewards"] = [1.0, 0.0, 0.25, 1.0, 0.5, 0.0]
    data["group"] = [0, 0, 0, 1, 1, 1]
    data["values"] = noise(0.5).tolist()
    data["values_old"] = noise(0.5).tolist()
    return data


def tensors(data: dict) -> SimpleNamespace:
    """The same as fp64 tensors; logp is a leaf."""
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in data.items() if k not in ("mask", "group")}
    t["logp"].requires_grad_()
    t["mask"] = torch.tensor(data["mask"])
    t["group"] = torch.tensor(data["group"])
    return SimpleNamespace(**t)


def trl_ratio(x: SimpleNamespace, mode: str, low: float | None, high: float) -> torch.Tensor:
    """TRL's importance ratios, by the lines of its own method that compute them."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index("if self.use_vllm and self.vllm_importance_sampling_correction:\n                mask =")
    start = source.rindex("\n", 0, start) + 1
    end = source.index("# Compute the per-token log probabilities for the reference model", start)
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "completion_mask": x.mask.double(),
        "tool_mask": None,
        "old_per_token_logps": x.logp_old,
        "sampling_per_token_logps": x.logp_mu,
    }
    exec(textwrap.dedent(source[start:end]), names)
    return names["vllm_importance_sampling_ratio"]


def trl_loss(x: SimpleNamespace, loss_type="grpo", *, low=0.2, high=0.2, level="token", ratio=None, **extra):
    """TRL's `_compute_loss` with the model's log-probs put in its place."""
    from trl import GRPOTrainer

    args = SimpleNamespace(delta=extra.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    same = SimpleNamespace(num_processes=1, gather=lambda v: v, reduce=lambda v, reduction: v)
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=same,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=extra.get("opsm"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=level,
        beta=extra.get("beta", 0.0),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=ratio is not None,
        current_gradient_accumulation_steps=1,
        max_completion_length=extra.get("max_length", 7),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (x.logp, torch.zeros_like(x.logp), None),
    )
    ids = torch.zeros_like(x.mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": x.mask.double(),
        "advantages": x.advantages,
        "old_per_token_logps": x.logp_old,
        "sampling_per_token_logps": x.logp_mu,
        "ref_per_token_logps": x.logp_ref,
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": x.mask.sum().double(),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, batch)


def verl_config(low, high, c=None):
    """verl's ActorConfig with the clip fields alone."""
    from verl.workers.config import ActorConfig

    config = object.__new__(ActorConfig)
    fields = dict(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, global_batch_info={})
    for name, value in (fields | ({"clip_ratio_c": c} if c else {})).items():
        object.__setattr__(config, name, value)
    return config


def verl_loss(x, kind="vanilla", agg="seq-mean-token-mean", *, low=0.2, high=0.2, c=None, old=None, **corr):
    """verl's policy loss by name, with its rollout correction in front if one is given."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    mask, weights = x.mask.double(), None
    if corr:
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(x.logp_old, x.logp_mu, mask, **corr)
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    adv = x.advantages[:, None].expand_as(x.logp)
    loss, _ = core_algos.get_policy_loss_fn(kind)(
        old_log_prob=x.logp_old if old is None else old,
        log_prob=x.logp,
        advantages=adv,
        response_mask=mask,
        loss_agg_mode=agg,
        config=verl_config(low, high, c),
        rollout_is_weights=weights,
    )
    return loss


def trl_cases() -> dict:
    """name → function of the inputs that gives TRL's loss."""
    return {
        "trl/grpo": lambda x: trl_loss(x),
        "trl/grpo_kl": lambda x: trl_loss(x, beta=0.05),
        "trl/dual_clip": lambda x: trl_loss(x, delta=1.5),
        "trl/dapo": lambda x: trl_loss(x, "dapo", high=0.28),
        "trl/dr_grpo": lambda x: trl_loss(x, "dr_grpo", max_length=12),
        "trl/gspo": lambda x: trl_loss(x, level="sequence", low=0.05, high=0.06),
        "trl/cispo": lambda x: trl_loss(x, "cispo", high=1.28),
        "trl/opsm": lambda x: trl_loss(x, opsm=0.02),
        "trl/tis": lambda x: trl_loss(x, ratio=trl_ratio(x, "token_truncate", None, 1.3)),
        "trl/seq_tis": lambda x: trl_loss(x, ratio=trl_ratio(x, "sequence_truncate", None, 1.5)),
        "trl/mis": lambda x: trl_loss(x, ratio=trl_ratio(x, "sequence_mask", None, 1.5)),
        "trl/icepop": lambda x: trl_loss(x, ratio=trl_ratio(x, "token_mask", 0.7, 1.4)),
        "trl/gspo_mis": lambda x: trl_loss(
            x, level="sequence", low=0.05, high=0.06, ratio=trl_ratio(x, "sequence_mask", None, 1.5)
        ),
    }


def verl_cases() -> dict:
    """name → function of the inputs that gives verl's loss."""
    token = dict(rollout_is="token", rollout_is_threshold=1.3)
    sequence = dict(rollout_is="sequence", rollout_is_threshold=1.5)

    def rs(statistic, bound, **more):
        return lambda x: verl_loss(x, agg="token-mean", rollout_rs=statistic, rollout_rs_threshold=bound, **more)

    return {
        "verl/grpo_dual": lambda x: verl_loss(x, c=3.0),
        "verl/dual_clip": lambda x: verl_loss(x, c=1.5),
        "verl/dapo": lambda x: verl_loss(x, agg="token-mean", high=0.28, c=3.0),
        "verl/gspo": lambda x: verl_loss(x, "gspo", low=0.05, high=0.06),
        "verl/gspo_tis": lambda x: verl_loss(x, "gspo", low=0.05, high=0.06, **token),
        "verl/cispo": lambda x: verl_loss(x, "cispo", agg="token-mean", low=0.2, high=0.28),
        "verl/dppo_tv": lambda x: verl_loss(x, "dppo_tv", agg="token-mean", c=20.0, old=x.logp_mu),
        "verl/token_is": lambda x: verl_loss(x, c=3.0, **token),
        "verl/token_is_normalized": lambda x: verl_loss(x, c=3.0, rollout_is_batch_normalize=True, **token),
        "verl/seq_is": lambda x: verl_loss(x, c=3.0, **sequence),
        "verl/seq_is_normalized": lambda x: verl_loss(x, c=3.0, rollout_is_batch_normalize=True, **sequence),
        "verl/icepop": lambda x: verl_loss(x, c=3.0, rollout_is="token", rollout_is_threshold="0.7_1.4"),
        "verl/rs_token_k1": rs("token_k1", "0.7_1.9", c=3.0),
        "verl/rs_token_k3": rs("token_k3", "0.05", c=3.0),
        "verl/rs_seq_sum_k1": rs("seq_sum_k1", "0.6_1.8", c=3.0),
        "verl/rs_seq_mean_k1": rs("seq_mean_k1", "0.9_1.15", c=3.0),
        "verl/rs_seq_max_k3": rs("seq_max_k3", "0.3", c=3.0),
        "verl/rs_two": rs("token_k2,seq_mean_k3", "0.2,0.1", c=3.0, **token),
    }


def verl_other(x) -> dict:
    """verl's advantages, GAE, value loss and mismatch metrics."""
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    mask = x.mask.double()
    last = x.mask.sum(-1) - 1
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], x.rewards[:, None])
    index = np.array(x.group.tolist())
    grpo, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index)
    rloo, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
    plus, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    adv, returns = core_algos.compute_gae_advantage_return(rewards, x.values, mask, 1.0, 0.95)
    values = x.values.clone().requires_grad_()
    loss, frac = core_algos.compute_value_loss(values, returns, x.values_old, mask, 0.5)
    (grad,) = torch.autograd.grad(loss, values)
    return {
        "grpo_advantage": grpo[:, 0].tolist(),
        "rloo_advantage": rloo[:, 0].tolist(),
        "reinforce_pp_baseline_token": (plus * mask).tolist(),
        "gae": (adv * mask).tolist(),
        "returns": (returns * mask).tolist(),
        "value_loss": float(loss),
        "value_grad": grad.tolist(),
        "value_clipfrac": float(frac),
        "offpolicy": compute_offpolicy_metrics(x.logp_old, x.logp_mu, mask),
    }


def run(cases: dict, data: dict) -> dict:
    """Loss and gradient of each case."""
    out = {}
    for name, f in cases.items():
        x = tensors(data)
        loss = f(x)
        (grad,) = torch.autograd.grad(loss, x.logp)
        out[name] = {"loss": float(loss.detach()), "grad": grad.tolist()}
    return out


def main(path: str) -> None:
    """Write the golden file."""
    data = inputs()
    golden = {
        "versions": {p: version(p) for p in ("trl", "verl", "torch")},
        "inputs": data,
        "cases": run(trl_cases(), data) | run(verl_cases(), data),
        "verl_other": verl_other(tensors(data)),
    }
    with open(path, "w") as f:
        json.dump(golden, f, indent=None, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
