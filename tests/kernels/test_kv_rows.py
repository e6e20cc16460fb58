"""Rows of a packed pool, stored and loaded, against indexing and `dequantize`."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import load_kv_rows, store_kv_rows
from tracekit.numerics import dequantize, quantize, unpack_codes


def rows(n, heads, d, g, device, seed=0):
    x = torch.randn(n, heads, d, generator=torch.Generator().manual_seed(seed)).mul(3).bfloat16()
    q = quantize(x, "nvfp4-exact", global_scale=torch.tensor(g))
    return q.packed.to(device), q.scales.to(device), q.dequantize()


def pools(slots, heads, d, device):
    return tuple(
        torch.full((slots, heads, d // n), 0xA5, dtype=torch.uint8, device=device) for n in (2, 16, 2, 16)
    )  # fmt: skip


@pytest.mark.parametrize("heads, d", [(4, 128), (1, 64), (2, 32), (3, 256)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store_and_load(device, heads, d, index):
    """Every row comes back where it was put, others are untouched, negative slots are left out."""
    n, size = 9, 40
    k, v = rows(n, heads, d, 64.0, device), rows(n, heads, d, 300.0, device, 1)
    slots = torch.randperm(size, generator=torch.Generator().manual_seed(2))[:n].to(index)
    slots[3] = -1
    all_pools = pools(size, heads, d, device)
    want = [p.clone() for p in all_pools]
    kept = slots >= 0
    for pool, row in zip(want, (*k[:2], *v[:2]), strict=True):
        pool[slots[kept].long()] = row[kept]
    store_kv_rows(k[:2], v[:2], slots.to(device), all_pools)
    assert all(torch.equal(a, b) for a, b in zip(all_pools, want, strict=True))
    for (codes, scales), g, values in ((all_pools[:2], 64.0, k[2]), (all_pools[2:], 300.0, v[2])):
        got = load_kv_rows(codes, scales, slots[kept].to(device), global_scale=g)
        assert got.dtype == torch.bfloat16 and torch.equal(got.cpu(), values[kept])


def test_every_code_and_scale_is_loaded(device):
    """16 codes under all scale bytes, NaN's too; a global scale whose inverse is not exact."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, 1, 2)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(device)
    scales = torch.arange(128, dtype=torch.uint8).view(128, 1, 1).expand(128, 1, 2).contiguous()
    slots = torch.arange(127, -1, -1, device=device)
    for g in (1.0, 300.0):
        got = load_kv_rows(packed, scales.to(device), slots, global_scale=g, dtype=torch.float32).cpu()
        want = dequantize(unpack_codes(packed.cpu(), 32), scales, "nvfp4-exact", g).flip(0)
        assert torch.equal(got.nan_to_num(7e5), want.nan_to_num(7e5)) and got[0].isnan().any()


def test_nothing_to_do(device):
    codes, scales, *_ = all_pools = pools(4, 2, 64, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert load_kv_rows(codes, scales, none, global_scale=1.0).shape == (0, 2, 64)
    store_kv_rows((codes[:0], scales[:0]), (codes[:0], scales[:0]), none, all_pools)


def test_refuses_wrong_shapes(device):
    all_pools = pools(4, 2, 64, device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    k = (all_pools[0][:3], all_pools[1][:3])
    with pytest.raises(ConfigError, match="do not fit"):
        store_kv_rows(k, (k[0][:2], k[1]), slots, all_pools)
    with pytest.raises(ConfigError, match="not of one pool"):
        load_kv_rows(all_pools[0], all_pools[1][:, :, :2], slots, global_scale=1.0)
    with pytest.raises(ConfigError, match="contiguous"):
        load_kv_rows(all_pools[0][:, ::2], all_pools[1][:, ::2], slots, global_scale=1.0)


def test_meta(device):
    all_pools = pools(4, 2, 64, device)
    slots = torch.arange(3, device=device)
    tests = ("test_schema", "test_faketensor")
    part = [p[:3].clone() for p in all_pools]
    torch.library.opcheck(torch.ops.tracekit.store_kv_rows, (*part, slots, *all_pools), test_utils=tests)
    torch.library.opcheck(
        torch.ops.tracekit.load_kv_rows, (*all_pools[:2], slots, 1.0, torch.bfloat16), test_utils=tests
    )
