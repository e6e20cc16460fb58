"""Run straight-line inline assembly on a CPU: the few PTX instructions that kernels use, over arrays of registers."""

import re

import numpy as np
import torch


def _prmt(a, b, selector):
    bytes_ = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)]
    bytes_ += [(byte >> np.uint32(7)) * np.uint32(255) for byte in bytes_]  # 8 | i: the sign of byte i, eight times
    picks = [int(selector) >> (4 * i) & 15 for i in range(4)]
    return sum(bytes_[p] << np.uint32(8 * i) for i, p in enumerate(picks)).astype(np.uint32)


def _larger_bf16(a, b):
    """The larger magnitude of each half, its sign the exclusive or of both; canonical NaN if either is NaN."""
    out = np.zeros_like(a)
    for shift in (0, 16):
        x, y = ((word >> np.uint32(shift)) & np.uint32(0xFFFF) for word in (a, b))
        magnitude = np.maximum(x & np.uint32(0x7FFF), y & np.uint32(0x7FFF))
        half = np.where(magnitude > 0x7F80, np.uint32(0x7FFF), magnitude | ((x ^ y) & np.uint32(0x8000)))
        out |= half.astype(np.uint32) << np.uint32(shift)
    return out


def _halves(word):
    return np.stack([word & np.uint32(0xFFFF), word >> np.uint32(16)], -1).astype(np.uint16).view(np.float16)


def _word(halves):
    bits = np.ascontiguousarray(halves, np.float16).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << np.uint32(16)


def _e4m3x2(half):
    two = np.stack([half & 255, half >> 8], -1).astype(np.uint8)
    return _word(torch.from_numpy(two).view(torch.float8_e4m3fn).float().numpy())


OPERATIONS = {
    "shl.b32": lambda a, n: a << np.uint32(n),
    "shr.u32": lambda a, n: a >> np.uint32(n),
    "and.b32": lambda a, b: a & np.uint32(b),
    "prmt.b32": _prmt,
    "cvt.rn.f16x2.e4m3x2": _e4m3x2,
    "mul.rn.f16x2": lambda a, b: _word(_halves(a) * _halves(b)),
    "max.NaN.xorsign.abs.bf16x2": _larger_bf16,
    "add.s32": lambda a, b: a + np.uint32(b),
    "setp.ne.b32": lambda a, b: a != np.uint32(b),
    "setp.ne.and.b32": lambda a, b, p: (a != np.uint32(b)) & p,
}
LOP3 = {0xEA: lambda a, b, c: (a & b) | c, 0x28: lambda a, b, c: (a ^ b) & np.uint32(c)}


def run(assembly: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """Registers $0 ... of `assembly` given uint32 arrays for the registers after its outputs."""
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def value(name):
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        name, rest = line.split(maxsplit=1)
        where = None
        if name[0] == "@":
            where = registers[name[1:]]
            name, rest = rest.split(maxsplit=1)
        if pair := re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest.strip()):
            low, high, source = pair.groups()
            registers[low] = (value(source) & np.uint32(0xFFFF)).astype(np.uint16)
            registers[high] = (value(source) >> np.uint32(16)).astype(np.uint16)
            continue
        target, *arguments = (part.strip() for part in rest.split(","))
        arguments = [value(a) for a in arguments]
        if name == "mov.b32":
            registers[target] = np.broadcast_to(arguments[0], inputs[0].shape)
        elif name == "lop3.b32":
            registers[target] = LOP3[int(arguments[3])](*arguments[:3])
        else:
            done = OPERATIONS[name](*arguments)
            registers[target] = done if where is None else np.where(where, done, registers[target])
    return [registers[f"${i}"] for i in range(outputs)]
