"""The configuration of a run. The text under each field is its help, its reference page and its schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ExpertProfile = Literal["none", "nvfp4-exact", "mxfp4-rceil", "int8", "fp8-e4m3"]
KVProfile = Literal["none", "nvfp4-exact", "mxfp4-rceil", "kv-mx16"]
GuidanceSite = Literal["moe_input", "k", "v"]
AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The language model: a Qwen3-style mixture of experts with a character tokenizer."""

    dim: int = 64
    """Width of the residual stream."""
    n_layers: int = 4
    """Transformer layers; each has a mixture of experts."""
    n_heads: int = 4
    """Query heads."""
    n_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Channels of a head."""
    n_experts: int = 8
    """Routed experts of a layer."""
    top_k: int = 2
    """Experts a token visits."""
    moe_hidden: int = 64
    """Width between an expert's two projections."""
    max_seq_len: int = 128
    """Longest prompt plus response."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Prompts and their grader."""

    name: str = "chain_sum"
    """A reasoning-gym data set: chain_sum, basic_arithmetic, products, ..."""
    params: dict = field(default_factory=dict)
    """Arguments of the data set, as reasoning-gym names them."""
    train_size: int = 20_000
    """Problems to draw training prompts from."""
    eval_size: int = 512
    """Held-out problems; none of them is among the training problems."""


@dataclass(kw_only=True, slots=True)
class WarmstartConfig:
    """Supervised training before reinforcement learning, quantisation-aware; cached under the run folder."""

    steps: int = 200
    """Optimizer steps; 0 starts from random weights."""
    batch_size: int = 256
    """Problems a step."""
    lr: float = 2e-3
    """Peak learning rate."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of responses."""

    engine: Literal["in_process", "sglang"] = "in_process"
    """Which engine samples. `in_process` needs nothing but torch; `sglang` starts one on this machine, with the plugin
    that rounds and records."""
    sglang: dict = field(default_factory=dict)
    """Further arguments of `sglang.Engine`, by their own names."""
    servers: list[str] = field(default_factory=list)
    """Addresses of SGLang servers to sample from (`http://host:port`), each started by `tracekit serve` on the run's
    `engine_model`; without any, `sglang` starts an engine itself."""
    kv_pool: Literal["bf16", "packed"] = "bf16"
    """What SGLang's cache holds of rounded K and V: their values, or four-bit codes and scales, which take 9/32 of the
    bytes (`quant.kv = "nvfp4-exact"`)."""
    server_timeout: float = 600
    """Seconds that a server may take to start, to answer a request or to load weights."""
    prompts_per_step: int = 64
    """Prompts of a step."""
    group_size: int = 8
    """Responses of a prompt; at least 2."""
    temperature: float = 1.0
    """Sampling temperature; the learner divides its logits by the same value."""
    max_response_len: int = 8
    """Tokens after which a response is cut."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the engine's activations; products accumulate in FP32 either way."""


@dataclass(kw_only=True, slots=True)
class QuantConfig:
    """Which values are rounded, in the sampler and in the learner alike."""

    experts: ExpertProfile = "nvfp4-exact"
    """Profile of the routed experts' weights and activations. `int8` and `fp8-e4m3` (W8A8: a scale a channel and a
    token) are not recorded; the in-process engine samples with them."""
    forward: Literal["emulated", "hardware"] = "emulated"
    """How the learner multiplies W8A8 experts: their dequantised values, or (QaRL's aligned forward) the codes, with
    the scales after the sum, where the device can. A GPU that cannot emulates; a CPU multiplies codes."""
    kv: KVProfile = "nvfp4-exact"
    """Profile of K and V in the softmax-attention layers."""
    global_scale: Literal["static", "token"] = "static"
    """Where NVFP4's encode scale comes from: one power of two a site, calibrated after warm start, or one a token."""
    headroom: float = 4.0
    """Static scales leave room for values this many times the calibrated maximum."""


@dataclass(kw_only=True, slots=True)
class GuidanceConfig:
    """The record of the sampler's rounding, and how the learner uses it."""

    bits: int = 1
    """Low bits of each code that are kept, 1 to 4; 0 records nothing and trains plain QAT."""
    mode: Literal["codes", "scale_only"] = "codes"
    """`scale_only` gives the learner the sampler's scales and rounds to nearest under them."""
    layers: str = "all"
    """`all`, `last_half` or `last:N`."""
    sites: list[GuidanceSite] = field(default_factory=lambda: ["moe_input", "k", "v"])
    """What is recorded of each layer: moe_input, k, v."""
    rounding: Literal["bracket", "bracket_open"] = "bracket"
    """What on-grid and saturated values do: stay, or move to the neighbour on the record's side."""
    encoding: Literal["lossless", "compact", "low2", "rm15"] = "lossless"
    """How a segment stores the record: the others leave out what the learner's own activations can restore. Rows too
    narrow to gain stay `lossless`; `rm15` needs one bit a code and is `compact` for more."""
    keep_steps: int = 2
    """Steps whose guidance stays on disk after the learner is done with it; -1 keeps all."""
    byte_budget: int = 0
    """Bytes that the run's guidance may take on disk; 0 is no limit. With a limit a step's guidance goes only after a
    checkpoint holds the step, those of `keep_steps` when their room is needed; a step that would not fit waits for a
    checkpoint that comes early."""
    audit_every: int = 1024
    """One token in this many is recorded whole, with its full codes and scales, and compared with the learner's own:
    `tracekit guidance stats RUN` shows what came of it. 0 audits none. The in-process engine does it."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    """Routing replay (R3): the learner sends each token to the experts that the sampler chose."""

    routing: Literal["r3", "off"] = "r3"
    """`r3` replays the expert ids and computes their gates afresh; `off` routes anew."""


@dataclass(kw_only=True, slots=True)
class AlgoConfig:
    """Advantages, surrogate and correction. A number left at none is the method's own, from its page in concepts/."""

    name: str = "grpo"
    """Surrogate: ppo, grpo, dr_grpo, dapo, gspo, cispo, tbpo, reinforce, minirl or dppo_tv."""
    correction: str = "tis"
    """Correction for the mismatch of sampler and learner, or `verl:PRESET`; `none` leaves it out."""
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] | None = None
    """Estimator of the advantages; none is the one that the surrogate was published with."""
    adv_std: Literal["none", "bessel", "population"] = "bessel"
    """GRPO's advantages: divide a group's centred rewards by this standard deviation."""
    clip_ratio_low: float | None = None
    """Lower clip of r = exp(logp - logp_old) is 1 minus this."""
    clip_ratio_high: float | None = None
    """Upper clip is 1 plus this."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of r where the advantage is negative, above 1."""
    is_cap: float | None = None
    """Cap of the mismatch weight, made of rho = exp(logp_old - logp_mu)."""
    loss_agg_mode: AggMode | None = None
    """How token losses become one number."""
    loss_max_length: int | None = None
    """Constant length of seq-mean-token-sum-norm; none is rollout.max_response_len."""
    denominator: Literal["original", "surviving"] | None = None
    """Whether rejected tokens stay in the denominators (`original`, the default) or not."""
    kl_coef: float | None = None
    """Weight of the KL term to the policy at the end of the warm start; none is 0, no term."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL; none is k3."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; none is 0."""
    mini_steps: int = 2
    """Optimizer steps on each batch of rollouts."""
    critic: Literal["separate", "shared"] = "separate"
    """Where gae's values come from: a network of its own (a copy of the warm start), or a head on the policy's."""
    critic_lr: float | None = None
    """Learning rate of the critic's AdamW; none is optim.lr."""
    vf_coef: float = 0.1
    """`shared`: weight of the value loss's gradient where it enters the policy's network; 0 trains the head alone."""
    value_clip: float | None = 0.5
    """Values move at most this far from the batch's first ones before their loss is clipped."""
    gae_gamma: float = 1.0
    """Discount of gae."""
    gae_lambda: float = 1.0
    """Decay of gae's advantages: 1 is the return minus the value."""
    kl_reward_coef: float = 0.0
    """gae: KL to the reference (k1), subtracted from each token's reward."""
    dynamic_sampling: bool = False
    """DAPO: drop prompts whose responses all have the same accuracy, and sample others until the batch is full."""
    max_sampling_rounds: int = 10
    """Rounds of sampling after which a batch that is not full ends the run."""
    overlong_buffer: int = 0
    """Length penalty (DAPO): it grows linearly over the last this many tokens of max_response_len; 0 is none."""
    overlong_penalty: float = 1.0
    """What a response of max_response_len loses of its reward."""
    overlong_filter: bool = False
    """Leave responses that were cut by length out of the loss; they stay in their group's baseline."""
    x_baseline_prompts: int = 0
    """ACRL's X: measure it before training on this many held-out prompts; 0 takes the first batch."""
    methods: dict = field(default_factory=dict)
    """Arguments of one surrogate or correction (`methods.grpo`), read when it is the chosen one; keys above win."""
    knobs: dict = field(default_factory=dict)
    """Further arguments of the chosen surrogate and correction, by their own names."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW in the RL phase."""

    lr: float = 3e-4
    """Learning rate."""
    warmup_steps: int = 4
    """Steps of linear warm-up."""
    decay_ratio: float = 0.8
    """Last part of the run over which the rate falls linearly to a tenth; 0 keeps it."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta2: float = 0.95
    """Second-moment decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    row_len: int = 128
    """Tokens of a packed row; the longest prompt plus response must fit."""
    microbatch_tokens: int = 8192
    """Tokens of one forward and backward."""
    logit_chunk_tokens: int = 0
    """Tokens whose logits exist at a time, so that none of [tokens, vocabulary] is ever whole; 0 makes them at once."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What a run can continue from."""

    interval: int = 20
    """Steps between checkpoints; the last step always writes one."""
    keep: int = 2
    """Complete checkpoints that stay."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Where numbers go. `metrics.jsonl` is always written."""

    eval_interval: int = 0
    """Steps between evaluations on the held-out problems; 0 evaluates before and after only."""
    rollouts: bool = False
    """Write each step's prompts, responses and rewards to rollouts/step_XXXXXX.jsonl."""
    histograms: bool = True
    """Write each step's histograms of the ratios to logs/histograms.jsonl."""
    by_layer: bool = False
    """Metrics of each guided site, layer by layer: how far the sampler's rounding is from the learner's own."""


@dataclass(kw_only=True, slots=True)
class Config:
    """One run of `tracekit train`."""

    name: str = "quickstart"
    """Name of the run; its folder is `out`/`name`."""
    out: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """Seeds data, weights and sampling."""
    steps: int = 60
    """RL steps."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
