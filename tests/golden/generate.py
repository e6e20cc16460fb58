"""Writes libraries.json: what other libraries' quantisers make of fixed bf16 tensors.

    python tests/golden/generate.py [--te DIR] [--sglang DIR]

Needs torch, torchao 0.18, compressed-tensors 0.20, nvidia-modelopt 0.47 and fouroversix 1.0 installed; --te and
--sglang name unpacked wheels of transformer_engine 2.20 and sglang 0.5, of which one file each is executed. Libraries
that are absent are left out with a note. The tests only read the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch

HERE = Path(__file__).parent


def inputs() -> dict[str, torch.Tensor]:
    """bf16 [16, 256] by a linear congruence, so that no library's generator decides the bits."""
    state = 12345
    flat = []
    for _ in range(16 * 256 * 12):
        state = (state * 1103515245 + 12345) % (1 << 31)
        flat.append(state / (1 << 31) - 0.5)
    normal = torch.tensor(flat, dtype=torch.float64).view(16, 256, 12).sum(-1).float()
    spread = torch.linspace(-6, 6, 16).exp2()[:, None]
    heavy = normal / (normal.roll(1, 1).abs() + 0.05)
    zeros = normal.clone()
    zeros[:, 32:64] = 0
    zeros[3] = 0
    zeros[5, ::7] = -0.0
    return {
        "weights": (normal * 0.02).bfloat16(),
        "spread": (normal * spread).bfloat16(),
        "heavy": heavy.bfloat16(),
        "integers": (normal * 6).round().bfloat16(),
        "zeros": zeros.bfloat16(),
    }


def hexed(t: torch.Tensor) -> str:
    return bytes(t.contiguous().view(torch.uint8).flatten().tolist()).hex()


def unpack(p: torch.Tensor) -> torch.Tensor:
    return torch.stack((p & 15, p >> 4), -1).flatten(-2)


def torchao(x, s2):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(x, 16, s2)
    return packed.view(torch.uint8), scales.view(torch.uint8)


def torchao_mx(x, mode):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, getattr(ScaleCalculationMode, mode))
    return packed.view(torch.uint8), scales.view(torch.uint8).view(x.shape[0], -1)


def torchao_mxfp8(x):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return codes.view(torch.uint8), scales.view(torch.uint8).view(x.shape[0], -1)


def modelopt(x, s2):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    q, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=s2)
    values = q.dequantize(dtype=torch.float32, scale=scales, double_scale=s2, block_sizes={-1: 16})
    return q._quantized_data, scales.view(torch.uint8), values


def compressed_tensors(x, g):
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(
        num_bits=4,
        type="float",
        group_size=16,
        strategy="tensor_group",
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    blocks = x.reshape(x.shape[0], -1, 16)
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)
    packed = quantize_and_pack_fp4(x, scales, global_scale=g, group_size=16)
    return packed, scales.to(torch.float8_e4m3fn).view(torch.uint8)


def fouroversix(x, amax, rule):
    from fouroversix.quantize.pytorch import reference
    from fouroversix.utils import DataType, RoundStyle, ScaleRule

    q, scales, _ = reference.quantize_to_fp4(
        x,
        fp4_format=DataType.nvfp4,
        scale_rule=ScaleRule(rule),
        round_style=RoundStyle("nearest"),
        use_blackwell_scale_layout=False,
        x_amax=torch.tensor(amax, dtype=torch.float32),
    )
    return q, scales.view(torch.uint8).view(x.shape[0], -1)


def transformer_engine(root: Path):
    """The NVFP4 reference quantiser of a transformer_engine wheel, without its native library."""
    recipes = "transformer_engine.pytorch.custom_recipes"
    for name in ("transformer_engine", "transformer_engine.pytorch", recipes):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    utils = types.ModuleType("reference_utils")
    utils.Fp4Formats = type("Fp4Formats", (), {"E2M1": "e2m1"})
    utils.roundup_div = lambda a, b: -(-a // b)
    sys.modules[recipes].gemm, sys.modules[recipes].reference_utils = MagicMock(), utils
    tensor = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    tensor.QuantizedTensorStorage = object
    tensor.Quantizer = type("Quantizer", (), {"__init__": lambda self, **kw: None})
    sys.modules[tensor.__name__] = tensor
    module = types.ModuleType("reference_nvfp4")
    sys.modules["reference_nvfp4"] = module
    path = root / "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py"
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)

    def run(x, amax, **kw):
        q, scales = module.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax.reshape(-1), 16, 1, pow_2_scales=False, eps=0.0, **kw
        )
        return q, scales.view(torch.uint8)

    return run


def sglang_kv(root: Path):
    """SGLang's block-16 FP4 pool quantiser, eagerly in fp32 (what its compiled form computes)."""
    path = root / "sglang/srt/layers/quantization/kvfp4_tensor.py"
    source = path.read_text().replace("from sglang.srt.runtime_context import get_platform", "")
    space: dict = {}
    exec(compile(source.replace("@torch.compile", ""), str(path), "exec"), space)

    def run(x):
        packed, scales = space["FP4MXBlock16KVQuantizeUtil"].batched_quantize(x.float()[None])
        return packed[0], scales.view(x.shape[0], -1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--te", type=Path)
    parser.add_argument("--sglang", type=Path)
    args = parser.parse_args()
    te = transformer_engine(args.te) if args.te else None
    kv = sglang_kv(args.sglang) if args.sglang else None
    cases, notes = [], []

    def add(library: str, profile: str, kind: str, g: torch.Tensor | None, fn, *fn_args, **fn_kw) -> None:
        try:
            packed, scales, *rest = fn(*fn_args, **fn_kw)
        except Exception as error:  # noqa: BLE001 - an absent or broken library is a note, not a failure
            notes.append(f"{library} {profile} {kind}: {type(error).__name__} {str(error)[:100]}")
            return
        case = dict(library=library, profile=profile, input=kind, codes=hexed(packed), scales=hexed(scales))
        case["global_scale"] = None if g is None else g.flatten().tolist()
        if rest:
            case["values"] = hexed(rest[0].float())
        cases.append(case)

    tensors = inputs()
    for kind, x in tensors.items():
        amax = x.float().abs().max()
        s2, g = amax / 2688, torch.div(torch.tensor(2688.0), amax)
        add("torchao 0.18.0", "nvfp4-torchao", kind, s2, torchao, x, s2)
        for mode in ("FLOOR", "EVEN", "RCEIL"):
            add("torchao 0.18.0", f"mxfp4-{mode.lower()}", kind, None, torchao_mx, x, mode)
        add("torchao 0.18.0", "mxfp8", kind, None, torchao_mxfp8, x)
        add("nvidia-modelopt 0.47.0", "nvfp4-modelopt", kind, s2, modelopt, x, s2)
        add("compressed-tensors 0.20.1", "nvfp4-ct", kind, g, compressed_tensors, x, g.reshape(1))
        if te:
            add("transformer_engine 2.20.2", "nvfp4-exact", kind, g, te, x.float(), amax)
            row = x.float().abs().amax(-1, keepdim=True)
            per_row = torch.where(row > 0, torch.div(torch.tensor(2688.0), row), 1.0)
            add("transformer_engine 2.20.2", "nvfp4-exact", kind, per_row, te, x.float(), row, row_scaled_nvfp4=True)
            for e, mode in ((448, "MSE"), (448, "MAE"), (256, "MSE"), (256, "MAE")):
                name = "nvfp4-4over6" + ("-mae" if mode == "MAE" else "") + ("-256" if e == 256 else "")
                scale = torch.div(torch.tensor(6.0 * e), amax)
                add(
                    "transformer_engine 2.20.2", name, kind, scale, te, x.float(), amax,
                    nvfp4_use_4over6=True, nvfp4_e4m3_max=e, nvfp4_4over6_err_mode=mode,
                    nvfp4_4over6_err_use_fast_math=True,
                )  # fmt: skip
        scale = torch.div(torch.tensor(1536.0), amax)
        add("fouroversix 1.0.5", "nvfp4-4over6-256", kind, scale, fouroversix, x, float(amax), "mse")
        if kv:
            add("sglang 0.5.23", "kv-mx16", kind, None, kv, x)
    out = dict(inputs={k: hexed(v) for k, v in tensors.items()}, shape=[16, 256], cases=cases)
    (HERE / "libraries.json").write_text(json.dumps(out, indent=0) + "\n")
    print(len(cases), "cases;", *notes, sep="\n")


if __name__ == "__main__":
    main()
