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
from tracekit.numerics.profiles import profile_info

TYPES = dict(
    x_ptr="*bf16", g_ptr="*fp32", ulp_ptr="*i8", packed_ptr="*i32", scales_ptr="*u8", low_ptr="*u16",
    values_ptr="*bf16", out_ptr="*bf16", slots_ptr="*i64", n_blocks="i32", blocks_per_scale="i32", four_bits="i32",
    blocks_per_token="i32", page="i32", n_groups="i32", groups_per_row="i32", width="i32", length="i32",
    low_width="i32",
)  # fmt: skip


def shared(profile: str, rows: int) -> dict:
    p = profile_info(profile)
    return dict(
        BLOCK=p.block, ROWS=rows, SCALES=1, CHAIN=CHAINS[profile], TABLE=False, E8M0=p.scale_format == "e8m0",
        MIN_SCALE=getattr(p, "min_scale", 0), AWAY=p.ties == "away", HARDWARE=True, PAIRS=True, INTERPRET=False,
    )  # fmt: skip


def sources(name: str):
    """(kernel, constexprs, types) of `quantize:PROFILE:BITS`, `guided:PROFILE:BITS`, `kv:PROFILE:LAYOUT` or
    `eight:KIND:BITS`."""
    kind, profile, n = name.split(":")
    if kind == "eight":
        options = dict(ROWS=1, CHUNK=4096, KIND=profile, TRUNCATE=False, BITS=int(n), OPEN=False, CODES=n == "0",
                       HARDWARE=True, INTERPRET=False)  # fmt: skip
        scales = "*u8" if profile == "mx" else "*fp32"
        types = TYPES | dict(low_ptr="*u8", given_ptr=scales, codes_ptr="*u8", scales_ptr=scales)
        return sys.modules["tracekit.kernels.eight_bit"]._eight_bit_kernel, options, types
    p, n = profile_info(profile), int(n)
    if kind == "guided":
        options = dict(BITS=n, OPEN=False, MISSING=p.missing_scale, **shared(profile, 32))
        kernel = sys.modules["tracekit.kernels.guided_qdq"]._guided_qdq_kernel
        return kernel, options, TYPES | {"low_ptr": "*u8"}
    if kind == "kv":
        options = dict(BITS=1, KEEP=p.keeps_minus_zero, LAYOUT=n, PER_HEAD=8, **shared(profile, 32))
        return sys.modules["tracekit.kernels.kv_write"]._write_kv_kernel, options, TYPES
    options = dict(BITS=n, VALUES=False, KEEP=p.keeps_minus_zero, **shared(profile, 64))
    return sys.modules["tracekit.kernels.quantize_pack"]._quantize_pack_kernel, options, TYPES


def report(name: str) -> dict:
    kernel, constexprs, types = sources(name)
    signature = {a: "constexpr" if a in constexprs else types[a] for a in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if a in types and (types[a][0] == "*" or a in ("n_blocks", "width", "length"))
    }
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constexprs.items()},
                       attrs=aligned)  # fmt: skip
    options = dict(num_warps=4 if name.startswith("eight") else 1, enable_fp_fusion=False)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        sass = subprocess.run([tool, "-c", f.name], capture_output=True, text=True, check=True).stdout
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
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(report(name)), flush=True)
