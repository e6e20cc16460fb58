"""Quantise-dequantise with its gradient against the PyTorch reference."""

import pytest
import torch

from tracekit.errors import ConfigError
from tracekit.kernels import fake_quantize
from tracekit.kernels.quantize_pack import KERNEL_PROFILES
from tracekit.numerics import fake_quantize as reference
from tracekit.numerics import profile_info


@pytest.mark.parametrize("profile", KERNEL_PROFILES)
@pytest.mark.parametrize("k, dtype", [(64, torch.bfloat16), (37, torch.float32)])
def test_equals_reference(device, profile, k, dtype, hard_rows):
    """Values bit for bit but for the sign of zeros, one scale and one a plane's token; gradient 1 everywhere."""
    x = hard_rows(k=k, dtype=dtype).view(12, 4, k)
    for g in (torch.tensor(448.3), torch.rand(12, 1, 1) * 300 + 1):
        g = 1 / g if profile_info(profile).decode_global else g
        y = x.to(device).requires_grad_()
        out = fake_quantize(y, profile, global_scale=g.to(device))
        assert out.dtype == dtype and torch.equal(out.detach().cpu(), reference(x, profile, global_scale=g))
        weight = torch.randn(x.shape, device=device).to(dtype)
        assert torch.equal(torch.autograd.grad(out, y, weight)[0], weight)


def test_strides_and_empty(device):
    x = torch.randn(40, 6, device=device).t()
    assert torch.equal(fake_quantize(x, "kv-mx16"), reference(x.contiguous(), "kv-mx16"))
    assert fake_quantize(x[:0], "mxfp4-rceil").shape == (0, 40)
    with pytest.raises(ConfigError, match="no kernel quantises int8"):
        fake_quantize(x, "int8")


def test_operator_checkpoint_and_compilation(device):
    """Meta function, schema and autograd; recomputation and whole-graph capture give the same gradient."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 32, device=device, requires_grad=True)
    args = (x, "nvfp4-exact", torch.tensor(30.0, device=device))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tracekit.fake_quantize, args, test_utils=utils)

    def layer(h):
        return fake_quantize(h * 1.01, "nvfp4-exact", global_scale=args[2]).square()

    plain = torch.autograd.grad(layer(x).sum(), x)[0]
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)[0]
    compiled = torch.autograd.grad(torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum(), x)[0]
    assert torch.equal(plain, again) and torch.equal(plain, compiled)
