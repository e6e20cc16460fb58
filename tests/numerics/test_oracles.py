"""Every profile against the libraries themselves, live, over millions of values; those of CI are committed outputs.

Run with `-m oracles -s` in an environment that has flashinfer-python 0.7.4, nvidia-modelopt 0.47.0, compressed-tensors
0.20.1, fouroversix 1.0.5, torchao 0.18.0, transformer_engine 2.20.2 and sglang 0.5.23 (each `--no-deps`; what is absent
or of another version is skipped). The results are in docs/numerics.md. A difference is named here with its condition,
or it is a failure.
"""

import importlib.metadata
import importlib.util
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch

from tracekit.numerics import quantize

pytestmark = pytest.mark.oracles
FAMILIES = ["normal", "heavy", "decades", "sparse", "every_bf16", "midpoints"]


@cache
def corpus():
    """Family -> x [rows, K]: bf16 of several distributions, every finite bf16, and fp32 midpoints one ulp around."""
    g = torch.Generator().manual_seed(7)
    n = torch.randn(2048, 1024, generator=g)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    mid, inf = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), torch.tensor(float("inf"))
    y = torch.cat([mid, torch.nextafter(mid, inf), torch.nextafter(mid, -inf), torch.arange(16) * 0.375])
    around = y[torch.randint(len(y), (1024, 256), generator=g)]
    around = around * torch.where(torch.rand(around.shape, generator=g) < 0.5, -1, 1)
    around[:, ::16] = 6.0
    return {
        "normal": n.bfloat16(),
        "heavy": (n / torch.rand(n.shape, generator=g).clamp(min=0.01)).bfloat16(),
        "decades": (n * torch.exp(4 * torch.randn(2048, 1, generator=g))).bfloat16(),
        "sparse": (n * (torch.rand(n.shape, generator=g) < 0.1)).bfloat16(),
        "every_bf16": every[torch.randperm(len(every), generator=g)][:65024].view(-1, 256).clone(),
        "midpoints": around * torch.exp2(torch.randint(-6, 7, (1024, 1), generator=g).float()),
    }


@cache
def peers():
    """The functions of tests/golden/generate.py, which call each library."""
    path = Path(__file__).parent.parent / "golden" / "generate.py"
    spec = importlib.util.spec_from_file_location("golden_generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need(library, version):
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    if found != version:
        pytest.skip(f"{library} is {found}, not {version}")


@cache
def flashinfer():
    """FlashInfer's CPU specification (nvfp4_reference, mx_reference) without the package's GPU imports."""
    root = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0])
    for part in ("", "batch_invariant", "batch_invariant/quantization"):
        module = types.ModuleType(".".join(["flashinfer", *part.split("/")]).rstrip("."))
        module.__path__ = [str(root / part)]
        sys.modules[module.__name__] = module
    base = "flashinfer.batch_invariant.quantization."
    return tuple(importlib.import_module(base + name) for name in ("nvfp4_reference", "mx_reference", "mx_spec"))


def compare(name, family, q, codes, scales):
    """Byte for byte, but for whom `codes` and `scales` are already what the named differences make of them."""
    codes = codes if codes.shape[-1] == q.codes.shape[-1] else peers().unpack(codes)
    differ = int((q.codes != codes.view(q.codes.shape)).sum()), int((q.scales != scales.view(q.scales.shape)).sum())
    print(f"{name}, {family}: {q.codes.numel():,} values, {differ[0]} codes and {differ[1]} scales differ")
    assert differ == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_flashinfer(family):
    need("flashinfer-python", "0.7.4")
    nvfp4, mx, spec = flashinfer()
    x = corpus()[family]
    g = torch.div(torch.tensor(2688.0), x.float().abs().max())
    codes, scales, _ = nvfp4.quantize_reference(x, g)
    scales = nvfp4.unswizzle_sf_128x4(scales, *x.shape)
    compare("flashinfer nvfp4-exact", family, quantize(x, "nvfp4-exact", global_scale=g), codes, scales)
    codes, scales, decode = nvfp4.quantize_reference(x, 1 / 2688, per_token=True)
    scales = nvfp4.unswizzle_sf_128x4(scales, *x.shape)
    q = quantize(x, "nvfp4-exact", amax="token")
    compare("flashinfer nvfp4-exact, a scale a token", family, q, codes, scales)
    assert torch.equal(torch.div(torch.tensor(1.0), q.global_scale[:, 0]), decode)
    for name, fmt, rule in (
        ("mxfp4-rceil", spec.MXFP4, spec.DEFAULT_RULE),
        ("mxfp4-floor", spec.MXFP4, spec.OCP_FLOOR_RULE),
        ("mxfp8", spec.MXFP8, spec.DEFAULT_RULE),
    ):
        codes, _, scales = mx.quantize_mx_reference(x, fmt, rule)
        compare(f"flashinfer {name}", family, quantize(x, name), codes, scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_modelopt(family):
    """Dequantised values too."""
    need("nvidia-modelopt", "0.47.0")
    x = corpus()[family]
    s2 = x.float().abs().max() / 2688
    codes, scales, values = peers().modelopt(x, s2)
    q = quantize(x, "nvfp4-modelopt", global_scale=s2)
    compare("modelopt nvfp4-modelopt", family, q, codes, scales)
    assert torch.equal(q.dequantize(torch.float32), values.view(x.shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors(family):
    need("compressed-tensors", "0.20.1")
    x = corpus()[family]
    g = torch.div(torch.tensor(2688.0), x.float().abs().max())
    codes, scales = peers().compressed_tensors(x, g.reshape(1))
    compare("compressed-tensors nvfp4-ct", family, quantize(x, "nvfp4-ct", global_scale=g), codes, scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_torchao(family):
    need("torchao", "0.18.0")
    x = corpus()[family]
    s2 = x.float().abs().max() / 2688
    q = quantize(x, "nvfp4-torchao", global_scale=s2)
    compare("torchao nvfp4-torchao", family, q, *peers().torchao(x, s2))
    for mode in ("FLOOR", "EVEN", "RCEIL"):
        name = f"mxfp4-{mode.lower()}"
        compare(f"torchao {name}", family, quantize(x, name), *peers().torchao_mx(x, mode))
    compare("torchao mxfp8", family, quantize(x, "mxfp8"), *peers().torchao_mxfp8(x))


def installed(package):
    """The folder that holds an installed package, of which one file is executed alone."""
    return Path(importlib.util.find_spec(package).submodule_search_locations[0]).parent


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine(family):
    """Its Python reference. Named: an exact -0 has code 0, and so has a negative whose quotient underflows to it."""
    need("transformer_engine", "2.20.2")
    x = corpus()[family].float()
    run = transformer_engine()
    amax, row = x.abs().max(), x.abs().amax(-1, keepdim=True)
    cases = [("nvfp4-exact", torch.div(torch.tensor(2688.0), amax), amax, {})]
    per_row = torch.where(row > 0, torch.div(torch.tensor(2688.0), row), 1.0)
    cases.append(("nvfp4-exact", per_row, row, dict(row_scaled_nvfp4=True)))
    for bound, mode in ((448, "MSE"), (448, "MAE"), (256, "MSE"), (256, "MAE")):
        name = "nvfp4-4over6" + ("-mae" if mode == "MAE" else "") + ("-256" if bound == 256 else "")
        four = dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=bound, nvfp4_4over6_err_mode=mode)
        scale = torch.div(torch.tensor(6.0 * bound), amax)
        cases.append((name, scale, amax, four | dict(nvfp4_4over6_err_use_fast_math=True)))
    for name, g, of, options in cases:
        q = quantize(x, name, global_scale=g)
        blocks = x.view(len(x), -1, 16)
        z = q.profile.normalise(blocks, q.scales, q.profile.scale_value(q.scales), g)
        q.codes = torch.where(z.view(x.shape) == 0, 0, q.codes)
        kind = ", a scale a token" if "row_scaled_nvfp4" in options else ""
        compare(f"transformer_engine {name}{kind}", family, q, *run(x, of, **options))


@cache
def transformer_engine():
    return peers().transformer_engine(installed("transformer_engine"))


@pytest.mark.parametrize("family", FAMILIES)
def test_sglang(family):
    """Its FP4 pool quantiser."""
    need("sglang", "0.5.23")
    x = corpus()[family]
    codes, scales = peers().sglang_kv(installed("sglang"))(x)
    compare("sglang kv-mx16", family, quantize(x, "kv-mx16"), codes, scales)


NEAR_TIES = {
    "mse": {"normal": 3, "heavy": 14, "decades": 3, "sparse": 3, "midpoints": 0},
    "mae": {"normal": 17, "heavy": 49, "decades": 9, "sparse": 153, "midpoints": 1},
}
"""Blocks of the corpus whose two candidates err alike to 2e-6 of the error, and fall to the other side."""


@pytest.mark.parametrize("rule, profile", [("mse", "nvfp4-4over6-256"), ("mae", "nvfp4-4over6-mae-256")])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "every_bf16"])
def test_fouroversix(family, rule, profile):
    """Blocks with a normal E4M3 scale. Named: an exact -0 has code 0; the candidates' errors are compared as
    q s amax / 1536 against x, so near ties may fall apart. (Below, its codes under a zero scale are 0, and z of 7 and
    above wraps to code 8; at 1e38, which `every_bf16` has, its errors overflow.)
    """
    need("fouroversix", "1.0.5")
    x = corpus()[family]
    amax = x.float().abs().max()
    g = torch.div(torch.tensor(1536.0), amax)
    q = quantize(x, profile, global_scale=g)
    codes, scales = peers().fouroversix(x, float(amax), rule)
    codes, scales = torch.where(x == 0, 0, peers().unpack(codes)), scales.view(q.scales.shape)
    blocks, own = codes.view(len(x), -1, 16), torch.where(x == 0, 0, q.codes).view(len(x), -1, 16)
    normal = (q.scales >= 8) & (scales >= 8)

    def error(codes, scales):
        magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[(codes & 7).long()]
        value = torch.where(codes >= 8, -magnitude, magnitude) * scales.view(torch.float8_e4m3fn).double()[..., None]
        gap = value / g.double() - x.view(blocks.shape).double()
        return (gap.square() if rule == "mse" else gap.abs()).sum(-1)

    other = normal & (q.scales != scales)
    ours, theirs = error(own, q.scales)[other], error(blocks, scales)[other]
    print(f"fouroversix {profile}, {family}: {16 * int(normal.sum()):,} values, {int(other.sum())} near ties")
    assert int(other.sum()) == NEAR_TIES[rule][family]
    assert ((ours - theirs).abs() <= 2e-6 * ours).all()
    assert torch.equal(own[normal & ~other], blocks[normal & ~other])
