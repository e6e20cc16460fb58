"""Prefill over the packed cache by SGLang's own kernels, in Triton's interpreter.

Apart from `test_packed.py`, whose engine stands for the whole file: SGLang ends one by killing every child of the
process, and the other's watchdog then takes that for a crash.
"""

import pytest
from conftest import serve

pytestmark = pytest.mark.long  # engines of its own


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


def test_pages_of_64_tokens(tmp_path, monkeypatch):
    """As engines on a GPU have them: prefill and decode are those of pages of one token, bit for bit, and prefixes of
    whole pages are found. (0.5.17 has no such pages on a CPU.)"""
    from sglang.srt.platforms import interface

    if not hasattr(interface, "PlatformCapabilities"):
        pytest.skip("this SGLang has pages of one token on a CPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sizes = {"model.head_dim": 128, "model.n_heads": 2, "model.n_kv_heads": 1}
    said = {}
    for page in (1, 64):
        arguments = {"attention_backend": "triton", "page_size": page, "chunked_prefill_size": 64}
        with serve(tmp_path / str(page), sizes, arguments, kv_pool="packed") as engine:
            for n in (62, 64, 100):
                engine.engine._engine.flush_cache()
                for again in (False, True):
                    out = engine.engine._engine.generate(
                        input_ids=[3 + i % 50 for i in range(n)],
                        sampling_params={"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
                        return_logprob=True,
                    )
                    said[page, n, again] = out["meta_info"]["output_token_logprobs"]
                    if again and page == 64:
                        assert out["meta_info"]["cached_tokens"] == (64 if n > 64 else 0)
    for n in (62, 64, 100):
        assert said[1, n, False] == said[64, n, False], n
        assert abs(said[64, n, True][0][0] - said[64, n, False][0][0]) < 0.05, n
