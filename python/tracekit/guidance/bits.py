"""Bit packing in numpy: element j of a row holds bits [b*j, b*j + b), LSB first; rows are padded to a byte."""

import numpy as np


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """u8 `[..., ceil(K * bits / 8)]` of the low `bits` of codes u8 `[..., K]`."""
    planes = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    flat = planes.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(flat, axis=-1, bitorder="little")


def unpack_rows(rows: np.ndarray, bits: int, width: int) -> np.ndarray:
    """u8 `[..., width]`, the inverse of `pack_rows`."""
    flat = np.unpackbits(rows, axis=-1, count=width * bits, bitorder="little")
    planes = flat.reshape(*rows.shape[:-1], width, bits)
    return (planes << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
