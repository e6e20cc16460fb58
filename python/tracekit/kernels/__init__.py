"""Triton kernels, one operation a file. On tensors that Triton cannot take, each runs its PyTorch reference."""

from tracekit.kernels.aligned_grouped import aligned_grouped
from tracekit.kernels.aligned_linear import aligned_linear
from tracekit.kernels.decode_record import DeviceRecord, decode_on_device, guided_from_record
from tracekit.kernels.eight_bit import guided_qdq_e4m3, quantize_eight_bit
from tracekit.kernels.expert_weights import PublishedWeights, fake_quantize_experts
from tracekit.kernels.fake_quantize import fake_quantize
from tracekit.kernels.fp4_decode_attention import fp4_decode_attention
from tracekit.kernels.guided_qdq import guided_qdq
from tracekit.kernels.kv_rows import load_kv_rows, store_kv_rows
from tracekit.kernels.kv_write import write_kv
from tracekit.kernels.low_bits import pack_low_bits, unpack_low_bits
from tracekit.kernels.quantize_pack import quantize_pack, quantize_pack_into

__all__ = [
    "DeviceRecord",
    "PublishedWeights",
    "aligned_grouped",
    "aligned_linear",
    "decode_on_device",
    "fake_quantize",
    "fake_quantize_experts",
    "fp4_decode_attention",
    "guided_from_record",
    "guided_qdq",
    "guided_qdq_e4m3",
    "load_kv_rows",
    "pack_low_bits",
    "quantize_eight_bit",
    "quantize_pack",
    "quantize_pack_into",
    "store_kv_rows",
    "unpack_low_bits",
    "write_kv",
]
