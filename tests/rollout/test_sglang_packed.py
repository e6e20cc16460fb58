"""What the packed cache and its attention do before SGLang has a part in it."""

import os
from types import SimpleNamespace

import pytest
import torch

from tracekit import numerics
from tracekit.errors import ConfigError, EngineError
from tracekit.kernels.decode_attention import reference_attention
from tracekit.rollout.sglang import packed_attention
from tracekit.rollout.sglang.packed_pool import Arriving, packed_bytes
from tracekit.rollout.sglang.settings import Settings

HEADS, GROUP, D, PAGE = 2, 3, 128, 4


@pytest.mark.parametrize("heads, dim", [(1, 128), (4, 128), (8, 256), (2, 32)])
def test_bytes_of_a_token(heads, dim):
    """Half a byte a value and a scale for 16, of K and of V: 3.56 times the tokens of BF16."""
    assert packed_bytes(2 * 2 * heads * dim) == 2 * heads * (dim // 2 + dim // 16)


def test_rows_arrive_once_and_for_their_layer():
    arriving, k, v = Arriving(), (torch.zeros(1), torch.ones(1)), (torch.ones(1), torch.zeros(1))
    arriving.put(3, k, v)
    assert arriving.take(3) == (k, v)
    with pytest.raises(EngineError, match="layer 3 reached the packed cache without being rounded"):
        arriving.take(3)
    arriving.put(3, k, v)
    with pytest.raises(EngineError, match="layer 4 reached"):
        arriving.take(4)


def test_another_cache_is_no_setting():
    with pytest.raises(ConfigError, match='kv_pool must be "bf16" or "packed", not \'fp4\''):
        Settings(folder="x", kv_pool="fp4")
    packed = Settings(folder="x", kv_pool="packed")
    assert packed.digest != Settings(folder="x").digest, "the handshake must see that an engine has another cache"


class Pool:
    """Random rows of one layer, as the pool holds them, and their values [slots, H, D] of K and of V."""

    page_size = PAGE
    reader = None

    def __init__(self, slots):
        self.scales = 64.0, 32.0
        q = [
            numerics.quantize(torch.randn(slots, HEADS, D), "nvfp4-exact", global_scale=torch.tensor(g))
            for g in self.scales
        ]
        self.rows = q[0].packed, q[0].scales, q[1].packed, q[1].scales
        self.values = [x.dequantize() for x in q]

    def packed(self, layer_id):
        assert layer_id == 5
        return self.rows

    def global_scales(self, layer_id):
        return self.scales


@pytest.mark.parametrize("lengths", [(9, 1, 30), (40, 40, 40)])
def test_decode_reads_the_engines_own_table(lengths):
    """Requests in scattered rows of the table, their pages in scattered slots; the table goes on beyond them."""
    torch.manual_seed(0)
    longest, pool = 40, Pool(3 * 40 + PAGE)
    pages = 1 + torch.randperm(3 * longest // PAGE).reshape(3, -1)
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    table = torch.zeros(7, longest + 4, dtype=torch.int32)
    requests = torch.tensor([6, 0, 3])
    table[requests, :longest] = slots.int()
    backend = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table))
    layer = SimpleNamespace(layer_id=5, tp_q_head_num=HEADS * GROUP, qk_head_dim=D, scaling=D**-0.5)
    batch = SimpleNamespace(seq_lens=torch.tensor(lengths), req_pool_indices=requests)
    q = torch.randn(3, HEADS * GROUP * D)
    got = packed_attention.decode(backend, q, layer, batch, longest)
    k, v = (x[slots] for x in pool.values)
    want = reference_attention(q.reshape(3, -1, D), k, v, batch.seq_lens, D**-0.5).flatten(1)
    assert got.shape == q.shape
    assert ((got - want).norm() / want.norm()).item() < 1e-3  # the kernel multiplies in fp16


def test_attention_that_cannot_read_the_cache_is_refused():
    runner = SimpleNamespace(token_to_kv_pool=Pool(4), attn_backend=SimpleNamespace())
    with pytest.raises(EngineError, match="cannot read the packed cache\nstart the engine with --attention-backend"):
        packed_attention.refuse_other_readers(runner)
    runner.token_to_kv_pool.reader = runner.attn_backend
    packed_attention.refuse_other_readers(runner)


def test_a_layer_without_keys_of_its_own_is_refused():
    class Attention:
        def __init__(self, runner):
            pass

    class Backend(packed_attention._Packed, Attention):
        pass

    layer = SimpleNamespace(layer_id=7)
    backend = Backend(SimpleNamespace(token_to_kv_pool=Pool(4), model_config=SimpleNamespace(context_len=8)))
    with pytest.raises(EngineError, match="layer 7 attends to another layer's K and V"):
        backend.forward_extend(None, None, None, layer, None)
    with pytest.raises(EngineError, match="layer 7 attends to another layer's K and V"):
        packed_attention._store(backend, None, None, layer, None, True, {})
    with pytest.raises(EngineError, match=r"layer 7 wants \['sinks'\] of attention"):
        packed_attention._store(backend, torch.zeros(1), None, layer, None, True, {"sinks": 1, "score_mod": None})


@pytest.mark.parametrize("before, after", [(None, "1"), ("0", "0")])
def test_the_table_is_held_unless_told_otherwise(monkeypatch, before, after):
    monkeypatch.setenv(packed_attention.BARRIER, before or "")
    if before is None:
        monkeypatch.delenv(packed_attention.BARRIER)
    packed_attention.hold_table()
    assert os.environ[packed_attention.BARRIER] == after
