"""Compile kernels for sm_90 on a machine without a GPU, and report on the code. Run as a program, interpreter off.

    python tests/kernels/ahead_of_time.py NAME...

prints one JSON object a line: name, registers, bytes of spills, instructions of the SASS, and facts about it.
"""

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tracekit.kernels import eight_bit, guided_qdq, kv_write, quantize_pack  # noqa: F401  (the modules are looked up below)
from tracekit.kernels.chains import CHAINS
from tracekit.kernels.decode_attention import _merge_kernel
from tracekit.kernels.fp4_decode_lanes import lanes_split_kernel
from tracekit.kernels.kv_rows import _load_kernel, _store_kernel
from tracekit.numerics.profiles import profile_info

TYPES = dict(
    x_ptr="*bf16", g_ptr="*fp32", ulp_ptr="*i8", packed_ptr="*i32", scales_ptr="*u8", low_ptr="*u16",
    values_ptr="*bf16", out_ptr="*bf16", slots_ptr="*i64", n_blocks="i32", blocks_per_scale="i32", four_bits="i32",
    blocks_per_token="i32", page="i32", n_groups="i32", groups_per_row="i32", width="i32", length="i32",
    low_width="i32", q_ptr="*bf16", kc_ptr="*i32", ks_ptr="*u8", vc_ptr="*i32", vs_ptr="*u8", table_ptr="*i32",
    rows_ptr="*i64", length_ptr="*i32", lse_ptr="*fp32", factor="fp32", table_stride="i32", n_splits="i32",
    split_tokens="i32",
)  # fmt: skip


def shared(profile: str, rows: int) -> dict:
    p = profile_info(profile)
    return dict(
        BLOCK=p.block, ROWS=rows, SCALES=1, CHAIN=CHAINS[profile], TABLE=False, E8M0=p.scale_format == "e8m0",
        MIN_SCALE=getattr(p, "min_scale", 0), AWAY=p.ties == "away", HARDWARE=True, PAIRS=True, INTERPRET=False,
        PARTIAL=False,
    )  # fmt: skip


def sources(name: str):
    """(kernel, constexprs, types) of `quantize:PROFILE:BITS`, `guided:PROFILE:BITS` (`floor-guided:...` in codes),
    `kv:PROFILE:LAYOUT` (each also as `partial-...`: rows with a short last block), `eight:KIND:BITS`,
    `attention:DECODE:TILE` (`slots-...`: by slots of tokens), `merge:-:TILE`, or `store:-:HEADS` and `load:-:HEADS` of
    rows of a packed pool."""
    if name.startswith("partial-"):
        kernel, options, types = sources(name.removeprefix("partial-"))
        return kernel, options | dict(PARTIAL=True, PAIRS=False), types | dict(packed_ptr="*u8", low_ptr="*u8")
    floor = name.startswith("floor-")
    kind, profile, n = name.removeprefix("floor-").removeprefix("slots-").split(":")
    if kind == "attention":
        options = dict(HEADS=4, GROUP=8, ROWS=8, D=128, PAGE=64, TILE=int(n), DECODE=profile,
                       SLOTS=name.startswith("slots-"))  # fmt: skip
        return lanes_split_kernel, options, TYPES | dict(out_ptr="*fp32")
    if kind == "merge":
        types = dict(part_ptr="*fp32", lse_ptr="*fp32", length_ptr="*i64", out_ptr="*bf16", factor="fp32",
                     n_splits="i32", split_tokens="i32", tile="i32")  # fmt: skip
        return _merge_kernel, dict(ROWS_PER_SEQUENCE=32, D=128), types
    if kind == "store":
        options = dict(CODES=int(n) * 16, SCALES=int(n) * 2)
        types = {a: "i32" if a.endswith("words") else "*i32" for a in _store_kernel.arg_names if a not in options}
        return _store_kernel, options, types | dict(slots_ptr="*i64")
    if kind == "load":
        types = dict(codes_ptr="*i32", scales_ptr="*u8", slots_ptr="*i64", out_ptr="*bf16", inverse="fp32", words="i32")
        return _load_kernel, dict(WIDTH=int(n) * 16, INTERPRET=False), types
    if kind == "eight":
        options = dict(ROWS=1, CHUNK=4096, KIND=profile, TRUNCATE=False, BITS=int(n), OPEN=False, CODES=n == "0",
                       HARDWARE=True, INTERPRET=False)  # fmt: skip
        scales = "*u8" if profile == "mx" else "*fp32"
        types = TYPES | dict(low_ptr="*u8", given_ptr=scales, codes_ptr="*u8", scales_ptr=scales)
        return sys.modules["tracekit.kernels.eight_bit"]._eight_bit_kernel, options, types
    p, n = profile_info(profile), int(n)
    low = "*i32" if n in (2, 4) else "*u16"
    if kind == "guided":
        options = dict(BITS=n, OPEN=False, FLOOR=floor, MISSING=p.missing_scale, **shared(profile, 32))
        kernel = sys.modules["tracekit.kernels.guided_qdq"]._guided_qdq_kernel
        return kernel, options, TYPES | dict(low_ptr=low)
    if kind == "kv":
        options = dict(BITS=1, KEEP=p.keeps_minus_zero, LAYOUT=n, PER_HEAD=8, **shared(profile, 32))
        return sys.modules["tracekit.kernels.kv_write"]._write_kv_kernel, options, TYPES
    options = dict(BITS=n, VALUES=False, KEEP=p.keeps_minus_zero, **shared(profile, 32))
    return sys.modules["tracekit.kernels.quantize_pack"]._quantize_pack_kernel, options, TYPES | dict(low_ptr=low)


def report(name: str) -> dict:
    kernel, constexprs, types = sources(name)
    signature = {a: "constexpr" if a in constexprs else types[a] for a in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if a in types
        and (types[a][0] == "*" or a in ("n_blocks", "width", "length"))
        and not (a == "length" and name.startswith("partial"))
    }
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constexprs.items()},
                       attrs=aligned)  # fmt: skip
    attention = "attention:" in name
    options = dict(num_warps=4 if name.startswith("eight") else 1, enable_fp_fusion=attention)
    if attention:
        options["num_stages"] = 2
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        sass = subprocess.run([tool, "-c", f.name], capture_output=True, text=True, check=True).stdout
    loop = longest_loop(sass)
    code = [m.group(1) for m in re.finditer(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Z0-9_.]+)", sass, re.M)]
    return dict(
        name=name,
        instructions=sum(c != "NOP" for c in code),
        spills=sum(c.startswith(("STL", "LDL")) for c in code),
        fp64=sum(c.startswith(("DADD", "DMUL", "DFMA", "F2F.F64")) for c in code),
        wide_loads=sum(c.startswith("LDG") and ".128" in c for c in code),
        wide_stores=sum(c.startswith("STG") and ".128" in c for c in code),
        approximate=ptx.count("rcp.approx") + ptx.count("div.approx") + ptx.count("div.full"),
        threads_wait=ptx.count("bar.sync"),
        loop=len(loop),
        loop_stores=sum(c.startswith("STS") for c in loop),
    )


def longest_loop(sass: str) -> list[str]:
    """Opcodes of the longest stretch that a branch jumps back over."""
    opcodes, labels, best = [], {}, (0, 0)
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line.strip()):
            labels[label.group(1)] = len(opcodes)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)(.*)", line):
            opcodes.append(code.group(1))
            target = re.search(r"`\((\.L\w+)\)", code.group(2)) if code.group(1) == "BRA" else None
            first = labels.get(target.group(1)) if target else None
            if first is not None and first < len(opcodes) - 4 and len(opcodes) - first > best[1] - best[0]:
                best = first, len(opcodes)
    return opcodes[best[0] : best[1]]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(report(name)), flush=True)
