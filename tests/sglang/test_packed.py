"""The packed cache inside a real engine: records as they were computed, log-probs as with BF16 values in the cache."""

from types import SimpleNamespace

import pytest
import torch
from conftest import serve
from engine_sizes import CHUNK
from test_engine import prompt, publish_noise

from tracekit import numerics
from tracekit.errors import EngineError
from tracekit.rollout.sglang.packed_pool import packed_bytes, pool_class
from tracekit.rollout.sglang.refusals import refuse_packed
from tracekit.rollout.sglang.settings import Settings

pytestmark = pytest.mark.long  # engines of its own


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Overrides the suite's engine in this file."""
    with serve(tmp_path_factory.mktemp("packed"), kv_pool="packed") as engine:
        yield engine


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_chunks(ask, recomputed, length):
    recomputed(ask([prompt(length)], 6, flush=True))


def test_prefix_cache(ask, recomputed):
    first = ask([prompt(40)], 4, flush=True)
    second = ask([prompt(40)], 4)
    assert second.outs[0]["meta_info"]["cached_tokens"] > 0
    recomputed(first)
    recomputed(second)


def test_four_at_once(ask, recomputed):
    recomputed(ask([prompt(20 + i, seed=i) for i in range(4)], 12, flush=True))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_in_flight(served, ask, recomputed, mode):
    recomputed(ask([prompt(10, seed=i) for i in range(2)], 100, flow=lambda m: publish_noise(served, m, mode)))
    served.engine.load(served.learner.publish())


def test_log_probs_are_those_over_bf16_values(ask, tmp_path):
    """Prompts are attended to alike, bit for bit; decode sums in another order. Teacher-forced, so that one token
    drawn otherwise does not make two different texts; four-bit rounding behind it makes much of a little at times."""
    prompts = [prompt(30, seed=i) for i in range(3)]
    got = ask(prompts, 16, flush=True)
    texts = [p + list(out["output_ids"]) for p, out in zip(prompts, got.outs, strict=True)]
    logp = [[entry[0] for entry in out["meta_info"]["output_token_logprobs"]] for out in got.outs]
    apart = []
    with serve(tmp_path) as plain:
        engine = plain.engine._engine
        for text, p, mine in zip(texts, prompts, logp, strict=True):
            for n in range(16):
                out = engine.generate(
                    input_ids=text[: len(p) + n],
                    sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
                    return_logprob=True,
                    logprob_start_len=-1,
                    token_ids_logprob=[text[len(p) + n]],
                )
                (theirs,) = out["meta_info"]["output_token_ids_logprobs"]
                apart.append(abs(theirs[0][0] - mine[n]))
                assert n or apart[-1] < 1e-6, "the first token follows from prefill alone"
    assert sum(apart) / len(apart) < 0.03, apart


def test_prefill_by_sglangs_triton_backend(tmp_path, monkeypatch):
    """Its kernels in Triton's interpreter, which is wrong about bf16 but alike for both caches: the first token's
    log-prob is the same bit for bit, behind prefixes of 0, 10 and 37 cached tokens; and decode runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sizes = {"model.head_dim": 128, "model.n_heads": 2, "model.n_kv_heads": 1}
    first = {}
    for kind in ("bf16", "packed"):
        with serve(tmp_path / kind, sizes, {"attention_backend": "triton"}, kv_pool=kind) as engine:
            for n in (10, 37, 40):
                out = engine.engine._engine.generate(
                    input_ids=list(range(3, 3 + n)),
                    sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
                    return_logprob=True,
                )
                logp = [entry[0] for entry in out["meta_info"]["output_token_logprobs"]]
                assert len(logp) == 4 and all(-12 < p <= 0 for p in logp)
                first[kind, n] = logp[0], out["meta_info"]["cached_tokens"]
    assert all(first["packed", n] == first["bf16", n] for n in (10, 37, 40)), first
    assert first["packed", 40][1] >= 37


def pool(cls, heads=2, dim=32, **more):
    return cls(
        64, 1, torch.bfloat16, heads, dim, layer_num=2, device="cpu", enable_memory_saver=False, start_layer=0,
        enable_alt_stream=False, **more,
    )  # fmt: skip


def test_the_pool_itself():
    """9/32 of the bytes; rows that were not rounded are refused, and so is a reader that knows nothing of it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    packed, plain = pool(pool_class()), pool(MHATokenToKVPool)
    assert sum(packed.get_kv_size_bytes()) == packed_bytes(sum(plain.get_kv_size_bytes()))
    assert packed_bytes(32) == 9
    layer = SimpleNamespace(layer_id=1)
    slots, x = torch.tensor([3, 5]), torch.randn(2, 2, 32).bfloat16()
    with pytest.raises(EngineError, match="layer 1 reached the packed cache without being rounded"):
        packed.set_kv_buffer(layer, slots, x, x)
    q = numerics.quantize(x, "nvfp4-exact", global_scale=torch.tensor(64.0))
    packed.static_scales = {"layers.1.k": 64.0, "layers.1.v": 64.0}
    packed.arriving.put(1, (q.packed, q.scales), (q.packed, q.scales))
    packed.set_kv_buffer(layer, slots, x, x)
    with pytest.raises(EngineError, match="read by tracekit's attention only"):
        packed.get_key_buffer(1)
    packed.reader = object()
    assert packed.get_key_buffer(1).shape == (0, 2, 32)
    packed.select(slots.flip(0))
    for values in packed.get_kv_buffer(1):
        assert torch.equal(values, q.dequantize().flip(0))
    with pytest.raises(EngineError, match="no packed cache of 1 heads of 32"):
        pool(pool_class(), heads=1)


@pytest.mark.parametrize(
    "more, why",
    [
        ({"kv": "mxfp4-rceil"}, "quant.kv = mxfp4-rceil"),
        ({"attention_backend": "flashinfer"}, "attention_backend flashinfer"),
        ({"enable_deterministic_inference": True}, "enable_deterministic_inference"),
        ({"pool": "plain"}, "a model whose cache is MHATokenToKVPool"),
        ({"logit_cap": 30.0}, "layer 0's logit cap"),
        ({"scales": {}}, "layers.0.k without a static scale"),
        ({"device": "cuda"}, "heads of 32 values on a GPU"),
    ],
)
def test_refusals(more, why):
    """Each with what to do about it, in two lines."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    scales = more.get("scales", {"layers.0.k": 64.0, "layers.0.v": 64.0})
    settings = Settings(folder="x", kv=more.get("kv", "nvfp4-exact"), kv_pool="packed", static_scales=scales)
    module = type("RadixAttention", (torch.nn.Module,), {})()
    vars(module).update(
        layer_id=0, sliding_window_size=-1, logit_cap=more.get("logit_cap", 0.0), qk_head_dim=32, v_head_dim=32
    )
    args = SimpleNamespace(attention_backend="torch_native") if "attention_backend" not in more else None
    runner = SimpleNamespace(
        server_args=args or SimpleNamespace(attention_backend=more["attention_backend"]),
        token_to_kv_pool=pool(MHATokenToKVPool if "pool" in more else pool_class()),
        device=more.get("device", "cpu"),
        model=torch.nn.ModuleList([module]),
    )
    vars(runner.server_args).update({k: v for k, v in more.items() if k.startswith("enable")})
    with pytest.raises(EngineError) as error:
        refuse_packed(settings, runner)
    assert why in str(error.value) and str(error.value).count("\n") == 1 and 'kv_pool = "bf16"' in str(error.value)
