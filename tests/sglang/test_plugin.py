"""The plugin and SGLang's own request objects, without an engine."""

import gc
from array import array
from types import SimpleNamespace

import numpy as np
import torch

from tracekit.rollout.sglang.plugin import Plugin
from tracekit.rollout.sglang.settings import Settings
from tracekit.rollout.sglang.store import SlotStore


def test_a_request_that_is_forgotten_while_it_waits_leaves_no_rows():
    """Pushed out, then aborted in the queue: no hook hears of it."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    plugin = Plugin(Settings(folder="nowhere"))
    plugin.store = SlotStore(64, 4)
    plugin.store.put(np.arange(16), np.zeros((16, 4), np.uint8), 0)
    req = Req("step/r0", "", array("q", range(8)), SamplingParams(max_new_tokens=8), vocab_size=64)
    req.output_ids.extend([1, 2, 3])
    req.req_pool_idx = 0
    if hasattr(req, "kv"):
        req.kv = SimpleNamespace(req_pool_idx=0)
    pool = SimpleNamespace(req_to_token=torch.arange(16).reshape(1, 16))
    plugin.pushed_out(req=req, req_to_token_pool=pool)
    (kept,) = plugin._kept.values()
    assert len(kept) == 8 + 3 - 1
    plugin.pushed_out(req=req, req_to_token_pool=pool)  # again, before it has run on: the same rows
    assert len(plugin._kept) == 1
    del req, kept
    gc.collect()
    assert not plugin._kept
