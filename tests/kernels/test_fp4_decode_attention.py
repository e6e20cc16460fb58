"""Decode attention over packed FP4 pools against float64."""

import sys

import numpy as np
import pytest
import torch
from run_ptx import run

from tracekit.errors import ConfigError
from tracekit.kernels import fp4_decode_attention, quantize_pack
from tracekit.numerics import dequantize, unpack_codes

module = sys.modules["tracekit.kernels.fp4_decode_attention"]


def problem(device, batch, heads, group, d, page, pages, seed=0):
    g = torch.Generator().manual_seed(seed)
    slots = page * batch * pages
    pools, values = [], []
    for scale in (512.0, 300.0):
        x = torch.randn(slots, heads, d, generator=g).bfloat16().to(device)
        codes, scales, _, _ = quantize_pack(x, "nvfp4-exact", global_scale=torch.tensor(scale, device=device))
        pools += [codes, scales]
        values.append(dequantize(unpack_codes(codes, d), scales, "nvfp4-exact", scale, torch.float64))
    table = torch.randperm(batch * pages, generator=g).view(batch, pages).int().to(device)
    q = torch.randn(batch, heads * group, d, generator=g).to(device)
    return q, pools, values, table


def run_op(q, pools, table, lengths, page, longest, rows=None):
    return fp4_decode_attention(
        q,
        *pools,
        table,
        lengths,
        page_size=page,
        softmax_scale=q.shape[-1] ** -0.5,
        k_global_scale=512.0,
        v_global_scale=300.0,
        max_length=longest,
        rows=rows,
    )


@pytest.mark.parametrize(
    "heads, group, d, page",
    [
        (2, 4, 128, 16),
        (1, 1, 128, 1),
        (1, 8, 128, 32),
        pytest.param(1, 16, 128, 64, marks=pytest.mark.long),
        pytest.param(1, 3, 256, 8, marks=pytest.mark.long),
    ],
)
def test_equals_float64(device, heads, group, d, page):
    """Ragged lengths, an empty sequence, shuffled pages, more splits than one; 1e-3 is fp16's products and softmax."""
    longest = 96
    pages = -(-longest // page)
    q, pools, (k, v), table = problem(device, 3, heads, group, d, page, pages)
    lengths = torch.tensor([93, 0, 65], dtype=torch.int32, device=device)
    got = run_op(q, pools, table, lengths, page, longest)
    rows = [module.gather_pages(t, table, page, longest) for t in (k, v)]
    want = module.reference_attention(q, *rows, lengths, d**-0.5)
    assert ((got - want).norm() / want.norm()).item() < 1e-3
    assert (got[1] == 0).all() and got.isfinite().all()


@pytest.mark.parametrize("page", [1, 16, 64])
def test_slots_of_an_engines_own_table(device, page):
    """`rows`: the table of an engine, a slot a token, sequences in any of its rows and shorter than the launch allows;
    int64 lengths, as SGLang has them. The same launch serves one token and all of them."""
    longest, d = 576, 128
    q, pools, (k, v), pages = problem(device, 4, 2, 4, d, page, longest // page)
    slots = (pages.long()[:, :, None] * page + torch.arange(page, device=device)).flatten(1).int()
    table = torch.zeros(9, longest + 5, dtype=torch.int32, device=device)
    requests = torch.tensor([7, 2, 0, 5], device=device)
    table[requests, :longest] = slots
    for lengths in ([570, 0, 129, 1], [1, 64, 33, 576]):
        lengths = torch.tensor(lengths, device=device)
        got = run_op(q, pools, table, lengths, page, longest, rows=requests)
        gathered = [module.gather_pages(t, pages, page, longest) for t in (k, v)]
        want = module.reference_attention(q, *gathered, lengths, d**-0.5)
        assert ((got - want).norm() / want.norm()).item() < 1e-3
        assert (got[lengths == 0] == 0).all() and got.isfinite().all()


@pytest.mark.parametrize("variant", [v for v in module.VARIANTS if v != module.VARIANT])
def test_variants_equal_float64(device, variant):
    """Every variant, ragged last tile and a page a tile; and scores of opposite sign, as a negative scale gives."""
    if not module.runs_triton(torch.empty(1, device=device)):
        pytest.skip("needs the kernel")
    page, longest = 64, 128
    q, pools, (k, v), table = problem(device, 1, 1, 8, 128, page, 2)
    lengths = torch.tensor([101], dtype=torch.int32, device=device)
    rows = [module.gather_pages(t, table, page, longest) for t in (k, v)]
    for scale in (128**-0.5, -0.1):
        got = module.launch_fp4(q, *pools, table, lengths, page, scale, 512.0, 300.0, longest, variant, (1, 128))
        want = module.reference_attention(q, *rows, lengths, scale)
        assert ((got - want).norm() / want.norm()).item() < 1e-3


@pytest.mark.parametrize("decode, page", [("e4m3", 64), ("shift", 64), ("e4m3", 1)])
def test_assembly_in_the_interpreter(device, decode, page, monkeypatch):
    """The kernel with its assembly, executed by `run_ptx`: the order of channels too."""
    if not module.INTERPRET:
        pytest.skip("on a GPU the other tests run it")
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    ran = []

    def inline(asm, constraints, args, dtype, is_pure, pack):
        types = dtype if isinstance(dtype, tuple) else (dtype,)
        words = [a.handle.data.astype(np.int64).astype(np.uint32) for a in args]
        ran.append(asm)
        bits = {16: (np.uint16, np.int16), 32: (np.uint32, np.int32)}
        out = []
        for array, t in zip(run(getattr(asm, "value", asm), len(types), *words), types, strict=True):
            unsigned, signed = bits[t.primitive_bitwidth]
            data = array.astype(unsigned).view(signed)
            out.append(tl.tensor(TensorHandle(data, t), tl.block_type(t, list(data.shape))))
        return tuple(out) if isinstance(dtype, tuple) else out[0]

    monkeypatch.setattr(tl, "inline_asm_elementwise", inline)
    monkeypatch.setattr(module, "decoding", lambda variant, q: decode)
    q, pools, (k, v), table = problem(device, 2, 1, 8, 128, page, 128 // page)
    lengths = torch.tensor([101, 64], dtype=torch.int32, device=device)
    rows = [module.gather_pages(t, table, page, 128) for t in (k, v)]
    got = module.launch_fp4(q, *pools, table, lengths, page, 128**-0.5, 512.0, 300.0, 128, "e4m3-32")
    want = module.reference_attention(q, *rows, lengths, 128**-0.5)
    assert ((got - want).norm() / want.norm()).item() < 1e-3
    assert any(("e4m3x2" in str(getattr(a, "value", a))) == (decode == "e4m3") for a in ran) and len(ran) > 8


def test_every_code_and_scale_is_exact_in_fp16(device):
    """One key a sequence makes the output that value itself: all 16 codes under all 127 scale bytes."""
    d, n = 128, 16
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)
    packed = (codes[0::2] | codes[1::2] << 4).expand(n, 1, 64).contiguous().to(device)
    scales = torch.arange(8 * n, dtype=torch.uint8).clamp(max=126).view(n, 1, 8).to(device)
    table = torch.arange(n, dtype=torch.int32, device=device)[:, None]
    lengths = torch.ones(n, dtype=torch.int32, device=device)
    got = fp4_decode_attention(
        torch.zeros(n, 1, d, device=device),
        packed,
        scales,
        packed,
        scales,
        table,
        lengths,
        page_size=1,
        softmax_scale=1.0,
        k_global_scale=1.0,
        v_global_scale=1.0,
        max_length=1,
    )
    want = dequantize(codes.expand(n, 1, d), scales.cpu(), "nvfp4-exact", 1.0)
    assert torch.equal(got.cpu(), want)


def test_unwritten_pool_slots_do_not_leak(device):
    """Pages beyond a sequence's length may hold anything, NaN scales included."""
    q, pools, _, table = problem(device, 2, 1, 4, 128, 16, 8)
    lengths = torch.tensor([20, 100], dtype=torch.int32, device=device)
    clean = run_op(q, pools, table, lengths, 16, 128)
    for t in (pools[1], pools[3]):
        t.view(-1, 16, 8)[table[0, 2:].long()] = 0x7F
    assert torch.equal(run_op(q, pools, table, lengths, 16, 128), clean)


def test_split_count_does_not_change_the_answer(device):
    if not module.runs_triton(torch.empty(1, device=device)):
        pytest.skip("needs the kernel")
    q, pools, _, table = problem(device, 2, 1, 4, 128, 16, 8)
    lengths = torch.tensor([128, 77], dtype=torch.int32, device=device)
    kc, ks, vc, vs = pools
    outs = [
        module.launch_fp4(q, kc, ks, vc, vs, table, lengths, 16, 0.1, 512.0, 300.0, 128, splits=(-(-128 // n), n))
        for n in (64, 128)
    ]
    for out in outs[1:]:
        assert torch.allclose(out, outs[0], atol=2e-3, rtol=1e-3)


def test_splits_cover_the_context():
    for sequences, longest in ((1, 1), (1, 131072), (64, 32768), (4096, 100)):
        n, tokens = module.choose_splits(sequences, 4, longest, 8 * 132, 128)
        assert n * tokens >= longest > (n - 1) * tokens and tokens % 128 == 0


def test_refuses_wrong_shapes(device):
    q, pools, _, table = problem(device, 1, 1, 2, 128, 16, 2)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ConfigError, match="k_scales"):
        run_op(q, [pools[0], pools[1][..., :4], *pools[2:]], table, lengths, 16, 32)
    with pytest.raises(ConfigError, match="128 n channels"):
        run_op(q[..., :64], pools, table, lengths, 16, 32)


def test_meta(device):
    q, pools, _, table = problem(device, 1, 1, 2, 128, 16, 2)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    args = (q, *pools, table, lengths, 16, 0.1, 512.0, 300.0, 32)
    torch.library.opcheck(torch.ops.tracekit.fp4_decode_attention, args, test_utils=("test_schema", "test_faketensor"))
