"""The packed cache inside a real engine: records as they were computed, log-probs as with BF16 values in the cache."""

import pytest
from conftest import serve
from engine_sizes import CHUNK
from test_engine import prompt, publish_noise

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
    result = ask([prompt(10, seed=i) for i in range(2)], 100, flow=lambda m: publish_noise(served, m, mode))
    recomputed(result, cache=mode == "in_place")
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
