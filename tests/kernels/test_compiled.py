"""What the compiler makes of the kernels for sm_90, found without a GPU: one subprocess, the interpreter off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EIGHT = [f"eight:{kind}:0" for kind in ("int8", "int4", "e4m3", "mx")] + ["eight:mx:2", "eight:e4m3:8"]
PROGRAM = Path(__file__).with_name("ahead_of_time.py")
QUICK = ["quantize:nvfp4-exact:1", "guided:nvfp4-exact:1", "guided:nvfp4-fast:1", "kv:nvfp4-exact:2"]
LONG = [
    *(f"quantize:{p}:1" for p in ("nvfp4-fast", "nvfp4-4over6", "nvfp4-modelopt", "nvfp4-torchao", "nvfp4-ct")),
    *(f"quantize:{p}:2" for p in ("mxfp4-rceil", "mxfp4-floor", "mxfp4-even", "kv-mx16")),
    *(f"guided:nvfp4-exact:{bits}" for bits in (2, 3, 4)),
    *(f"guided:{p}:1" for p in ("nvfp4-modelopt", "nvfp4-torchao", "nvfp4-ct", "nvfp4-4over6-mae", "mxfp4-even")),
]


def compiled(names):
    """What `ahead_of_time` reports of each of `names`."""
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(PROGRAM), *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in rows] == names
    return rows


@pytest.mark.parametrize("names", [QUICK, pytest.param(LONG, marks=pytest.mark.long)], ids=["quick", "long"])
def test_code_for_hopper(names):
    """No spills to local memory, no fp64, 16-byte loads, no barrier; approximate reciprocals in nvfp4-fast alone."""
    rows = compiled(names)
    for r in rows:
        assert r["instructions"] > 100 and r["wide_loads"] >= 2, r
        assert r["spills"] == r["fp64"] == r["threads_wait"] == 0, r
        assert (r["approximate"] > 0) == ("nvfp4-fast" in r["name"]), r


def test_code_for_short_last_blocks():
    """The branch for rows that blocks do not divide compiles too, without spills or fp64."""
    rows = compiled(["partial-quantize:nvfp4-exact:1", "partial-guided:mxfp4-rceil:2", "partial-kv:nvfp4-exact:1"])
    assert all(r["instructions"] > 100 and r["spills"] == r["fp64"] == 0 for r in rows), rows


def test_codes_and_maxima_on_pairs_and_integers():
    """nvfp4-exact, every branch counted: 520 and 554 instructions with triton 3.8, where fp32 maxima, fp32 minima and a
    sign an element took 576 and 610."""
    rows = compiled(["quantize:nvfp4-exact:0", "quantize:nvfp4-exact:1"])
    assert all(r["instructions"] < limit for r, limit in zip(rows, (560, 600), strict=True)), rows


@pytest.mark.long
def test_guided_rounding_in_codes_takes_fewer_instructions():
    """`guided_floor` against the default rule, by bits; and it neither spills nor waits."""
    rows = compiled([f"{rule}guided:nvfp4-exact:{bits}" for bits in (1, 2, 3, 4) for rule in ("", "floor-")])
    assert all(r["spills"] == r["fp64"] == r["threads_wait"] == 0 for r in rows), rows
    for values, codes in zip(rows[::2], rows[1::2], strict=True):
        assert codes["instructions"] < 0.9 * values["instructions"], (values, codes)


@pytest.mark.long
def test_eight_bit_code_for_hopper():
    """The same of the kernels over rows, which reduce across warps and so do wait."""
    rows = compiled(EIGHT)
    assert all(r["spills"] == r["fp64"] == r["approximate"] == 0 and r["wide_loads"] >= 2 for r in rows), rows


@pytest.mark.parametrize(
    "names",
    [
        ["attention:e4m3:32", "slots-attention:e4m3:32"],
        pytest.param(["attention:e4m3:64", "attention:shift:32"], marks=pytest.mark.long),
    ],
    ids=["default", "others"],
)
def test_attention_code_for_hopper(names):
    """A key or value costs under four instructions (under 3.5 by way of E4M3), loop, softmax and loads included, and
    decoded operands never pass through shared memory: as fp16 they would take a store for every eight elements.
    """
    rows = compiled(names)
    for r in rows:
        elements = 2 * 128 * int(r["name"].split(":")[2]) / 32  # of K and V, a lane and tile
        assert r["spills"] == r["fp64"] == 0, r
        assert 2 < r["loop"] / elements < (3.5 if "e4m3" in r["name"] else 4), r
        assert r["loop_stores"] < elements / 16, r


def test_pool_rows_and_merge_for_hopper():
    """The small kernels around decode attention: no spills, no fp64, and no warp waits for another."""
    rows = compiled(["merge:-:32", "store:-:4", "load:-:4", "load:-:1"])
    assert all(r["instructions"] > 100 and r["spills"] == r["fp64"] == r["threads_wait"] == 0 for r in rows), rows
