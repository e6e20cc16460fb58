"""Quantiser profiles in PyTorch: the reference that kernels and the Rust core equal byte for byte."""

from tracekit.numerics.formats import (
    e2m1_decode,
    e4m3_decode,
    e8m0_decode,
    pack_codes,
    unpack_codes,
)
from tracekit.numerics.guided import guided_round, low_bits
from tracekit.numerics.guided_table import guide_by_table, guided_round_e4m3
from tracekit.numerics.profiles import PROFILES, Profile, profile_info
from tracekit.numerics.quantize import (
    Quantized,
    dequantize,
    fake_quantize,
    quantize,
    quantize_dequantize,
    straight_through,
)
from tracekit.numerics.scales import (
    absolute_maximum,
    expert_global_scale,
    global_scale_for,
    token_global_scale,
)

__all__ = [
    "PROFILES",
    "Profile",
    "Quantized",
    "absolute_maximum",
    "dequantize",
    "e2m1_decode",
    "e4m3_decode",
    "e8m0_decode",
    "expert_global_scale",
    "fake_quantize",
    "global_scale_for",
    "guide_by_table",
    "guided_round",
    "guided_round_e4m3",
    "low_bits",
    "pack_codes",
    "profile_info",
    "quantize",
    "quantize_dequantize",
    "straight_through",
    "token_global_scale",
    "unpack_codes",
]
