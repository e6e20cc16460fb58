"""Packed NVFP4 keys and values to fp16 operands of a matrix product, inside the lane that has loaded them.

A tensor core wants neighbouring elements of the *reduced* axis in one register: two channels of a key, two tokens of a
value. The order of channels in q . k and of tokens in p . v is free, so both expansions put a word's eight channels at
the places that its own lane holds, and nothing passes through shared memory once it is decoded. `key_channels` and
`value_channels` give the channel at each place.

Three ways to decode give the same values up to a power of two; code times scale is exact in fp16 in each.

* "e4m3" (sm_89 and later): an E2M1 code in an E4M3 byte, (code & 8) << 4 | (code & 7) << 2, is its value times 2^-6;
  seven instructions turn eight nibbles into eight such bytes, and the hardware converts two to fp16 in one.
* "shift": a code at the top of an fp16, (code & 8) << 12 | (code & 7) << 9, is its value times 2^-14; two shifts and
  two masks for two nibbles.
* "integer": the same without assembly, for the interpreter.
"""

from __future__ import annotations

from tracekit.kernels._triton import jit, tl

CODE_FACTOR = {"e4m3": 2.0**6, "shift": 2.0**14, "integer": 2.0**14}  # what expanded values lack
_REGISTERS = ".reg .b32 a, b, e, o, r, x, y; .reg .b16 l, h;"


def _two_halves(name: str, scale: str, low: tuple[int, int], high: tuple[int, int]) -> str:
    """PTX: E4M3 bytes 0 and 1 of register `name` to outputs `low`, 2 and 3 to `high`, times a pair of scales."""
    return f"mov.b32 {{l, h}}, {name};" + "".join(
        f"cvt.rn.f16x2.e4m3x2 r, {half}; mul.rn.f16x2 r, r, {scale}; mov.b32 {{${i}, ${j}}}, r;\n"
        for half, (i, j) in (("l", low), ("h", high))
    )


def _bytes(word: str) -> str:
    """PTX: nibbles 0, 2, 4, 6 of a word to E4M3 bytes in e, the others in o."""
    return f"""shl.b32 a, {word}, 4; shl.b32 b, {word}, 2; and.b32 b, b, 0x1C1C1C1C; lop3.b32 e, a, 0x80808080, b, 0xEA;
shr.u32 b, {word}, 2; and.b32 b, b, 0x1C1C1C1C; lop3.b32 o, {word}, 0x80808080, b, 0xEA;\n"""


def _one_place(word: str, scale: str, place: int, outputs: tuple[int, int]) -> str:
    """PTX: nibbles `place` and `place` + 4 of a word to outputs, by shifts."""
    magnitude = f"shl.b32 b, {word}, {9 - 4 * place};" if place < 3 else f"shr.u32 b, {word}, 3;"
    return f"""shl.b32 a, {word}, {12 - 4 * place}; {magnitude} and.b32 b, b, 0x0E000E00;
lop3.b32 r, a, 0x80008000, b, 0xEA; mul.rn.f16x2 r, r, {scale}; mov.b32 {{${outputs[0]}, ${outputs[1]}}}, r;\n"""


def key_assembly(decode: str) -> str:
    """Outputs 0-7: a word's channels by slot (see `key_channels`); inputs $8 the word, $9 its scale twice."""
    if decode == "e4m3":
        body = _bytes("$8") + _two_halves("e", "$9", (0, 2), (4, 6)) + _two_halves("o", "$9", (1, 3), (5, 7))
    else:
        slots = ((0, 2), (4, 6), (1, 3), (5, 7))
        body = "".join(_one_place("$8", "$9", place, slots[place]) for place in range(4))
    return "{ " + _REGISTERS + "\n" + body + "}"


def value_assembly(decode: str) -> str:
    """Outputs 2 i and 2 i + 1: channel i of two tokens; inputs $16 and $17 their words, $18 their scales."""
    body = ""
    if decode == "e4m3":
        body += "prmt.b32 x, $16, $17, 0x5140; prmt.b32 y, $16, $17, 0x7362;\n"
        for word, first in (("x", 0), ("y", 4)):
            body += _bytes(word)
            for name, i in (("e", 2 * first), ("o", 2 * first + 2)):
                body += _two_halves(name, "$18", (i, i + 1), (i + 4, i + 5))
    else:
        body += "prmt.b32 x, $16, $17, 0x5410; prmt.b32 y, $16, $17, 0x7632;\n"
        for word, first in (("x", 0), ("y", 8)):
            body += "".join(_one_place(word, "$18", p, (first + 2 * p, first + 2 * p + 1)) for p in range(4))
    return "{ " + _REGISTERS + "\n" + body + "}"


SCALE_ASSEMBLY = {  # output: fp16 pair of the E4M3 bytes in $1 and $2
    "e4m3": "{ .reg .b32 a; .reg .b16 l, h; prmt.b32 a, $1, $2, 0x5540; mov.b32 {l, h}, a; "
    "cvt.rn.f16x2.e4m3x2 $0, l; }",
    "shift": "{ .reg .b32 a, f; mov.b32 f, 0x5C005C00; prmt.b32 a, $1, $2, 0x5410; shl.b32 a, a, 7; "
    "mul.rn.f16x2 $0, a, f; }",
}
_SCALES_E4M3, _SCALES_SHIFT = tl.constexpr(SCALE_ASSEMBLY["e4m3"]), tl.constexpr(SCALE_ASSEMBLY["shift"])
_KEY_E4M3, _VALUE_E4M3 = tl.constexpr(key_assembly("e4m3")), tl.constexpr(value_assembly("e4m3"))
_KEY_SHIFT, _VALUE_SHIFT = tl.constexpr(key_assembly("shift")), tl.constexpr(value_assembly("shift"))
_KEY_REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_VALUE_REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")


@jit
def _scale_pair(first, second, DECODE: tl.constexpr):
    """E4M3 bytes (int32) -> int32 holding their fp16 values, `first` in the low half."""
    if DECODE != "integer":
        return tl.inline_asm_elementwise(
            _SCALES_E4M3 if DECODE == "e4m3" else _SCALES_SHIFT, "=r,r,r", [first, second], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = ((first << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0).to(tl.int16, bitcast=True)
        b = ((second << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0).to(tl.int16, bitcast=True)
        return (a.to(tl.int32) & 0xFFFF) | (b.to(tl.int32) << 16)


@jit
def _nibble(word, scale, PLACE: tl.constexpr):
    """Nibble PLACE of int32 words times fp16 scales, times 2^-14, as int16 bits."""
    code = word >> (4 * PLACE)
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return (bits.to(tl.int16).to(tl.float16, bitcast=True) * scale).to(tl.int16, bitcast=True)


@jit
def _key_halves(w, s, DECODE: tl.constexpr):
    """int16 bits of a word's eight channels by slot, scaled."""
    if DECODE == "integer":
        f = s.to(tl.int16).to(tl.float16, bitcast=True)
        return (_nibble(w, f, 0), _nibble(w, f, 1), _nibble(w, f, 2), _nibble(w, f, 3),
                _nibble(w, f, 4), _nibble(w, f, 5), _nibble(w, f, 6), _nibble(w, f, 7))  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _KEY_E4M3 if DECODE == "e4m3" else _KEY_SHIFT, _KEY_REGISTERS, [w, s], dtype=(tl.int16,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip


@jit
def _value_halves(a, b, s, DECODE: tl.constexpr):
    """int16 bits of the eight channels of two tokens' words, scaled: channel 0 of a, of b, channel 1 of a, ..."""
    if DECODE == "integer":
        f = s.to(tl.int16).to(tl.float16, bitcast=True)
        g = (s >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return (_nibble(a, f, 0), _nibble(b, g, 0), _nibble(a, f, 1), _nibble(b, g, 1),
                _nibble(a, f, 2), _nibble(b, g, 2), _nibble(a, f, 3), _nibble(b, g, 3),
                _nibble(a, f, 4), _nibble(b, g, 4), _nibble(a, f, 5), _nibble(b, g, 5),
                _nibble(a, f, 6), _nibble(b, g, 6), _nibble(a, f, 7), _nibble(b, g, 7))  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _VALUE_E4M3 if DECODE == "e4m3" else _VALUE_SHIFT, _VALUE_REGISTERS, [a, b, s], dtype=(tl.int16,) * 16,
            is_pure=True, pack=1,
        )  # fmt: skip


@jit
def _by_word(s, N: tl.constexpr, W: tl.constexpr):
    """[N, W/2] of blocks -> [N, W] of words."""
    return tl.reshape(tl.broadcast_to(s[:, :, None], (N, W // 2, 2)), (N, W))


@jit
def expand_keys(word, byte, N: tl.constexpr, D: tl.constexpr, DECODE: tl.constexpr):
    """Words int32 [N, D/8] and scale bytes int32 [N, D/16] of N tokens -> fp16 [N, D] in `key_channels` order."""
    W: tl.constexpr = D // 8
    s = _by_word(_scale_pair(byte, byte, DECODE), N, W)
    h0, h1, h2, h3, h4, h5, h6, h7 = _key_halves(word, s, DECODE)
    even = tl.join(tl.join(h0, h2), tl.join(h4, h6))
    odd = tl.join(tl.join(h1, h3), tl.join(h5, h7))
    k = tl.reshape(tl.join(even, odd), (N, W // 8, 4, 2, 2, 2, 2))  # token; word >> 3, >> 1, & 1; slot bits 1, 2, 0
    return tl.reshape(tl.permute(k, (0, 1, 3, 2, 6, 5, 4)), (N, D)).to(tl.float16, bitcast=True)


@jit
def key_channels(D: tl.constexpr, DECODE: tl.constexpr):
    """The channel at each place of an expanded key. Slots 0 and 2, 4 and 6, 1 and 3, 5 and 7 of a word share
    registers; by shifts these are nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7."""
    i = tl.arange(0, D)
    word = ((i >> 6) << 3) | ((i >> 2) & 6) | ((i >> 5) & 1)
    if DECODE == "shift":
        return (word << 3) | ((i & 1) << 2) | ((i >> 1) & 3)
    else:
        return (word << 3) | ((i & 3) << 1) | ((i >> 2) & 1)


@jit
def expand_values(even, odd, even_byte, odd_byte, N: tl.constexpr, D: tl.constexpr, DECODE: tl.constexpr):
    """Words int32 [N/2, D/8] and bytes int32 [N/2, D/16] of N tokens, even and odd ones apart -> fp16 [D, N] with
    channels in `value_channels` order, tokens in their own."""
    W: tl.constexpr = D // 8
    s = _by_word(_scale_pair(even_byte, odd_byte, DECODE), N // 2, W)
    a0, b0, a1, b1, a2, b2, a3, b3, a4, b4, a5, b5, a6, b6, a7, b7 = _value_halves(even, odd, s, DECODE)
    low = tl.join(tl.join(tl.join(a0, b0), tl.join(a1, b1)), tl.join(tl.join(a2, b2), tl.join(a3, b3)))
    high = tl.join(tl.join(tl.join(a4, b4), tl.join(a5, b5)), tl.join(tl.join(a6, b6), tl.join(a7, b7)))
    v = tl.reshape(tl.join(low, high), (N // 2, W // 16, 8, 2, 2, 2, 2, 2))  # pair; word >> 4, >> 1, & 1; token; bits
    return tl.reshape(tl.permute(v, (1, 3, 7, 6, 5, 2, 0, 4)), (D, N)).to(tl.float16, bitcast=True)


@jit
def value_channels(D: tl.constexpr):
    """The channel at each place of an expanded value."""
    i = tl.arange(0, D)
    return ((i >> 7) << 7) | ((i & 7) << 4) | (((i >> 6) & 1) << 3) | ((i >> 3) & 7)
