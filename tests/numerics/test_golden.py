"""Quantisers against vectors that independent libraries agree on (`agree`), and against their known disagreements."""

import json
from pathlib import Path

import pytest
import torch

from tracekit.numerics import quantize, quantize_dequantize

GOLDEN = Path(__file__).parent.parent / "golden"
NVFP4 = json.loads((GOLDEN / "vectors_nvfp4.json").read_text())
MXFP4 = json.loads((GOLDEN / "vectors_mxfp4.json").read_text())


def blocks(rows):
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float32)


@pytest.mark.parametrize("vector", NVFP4, ids=lambda v: v["id"])
def test_nvfp4_exact_vector(vector):
    x = blocks(vector["x"]).reshape(1, -1)
    q = quantize(x, "nvfp4-exact", global_scale=vector["g"])
    assert q.scales[0].tolist() == vector["expect"]["sf"]
    assert ["".join(f"{c:x}" for c in row) for row in q.codes.view(-1, 16).tolist()] == vector["expect"]["codes"]
    assert [bytes(row).hex() for row in q.packed.view(-1, 8).tolist()] == vector["packed"]
    assert q.dequantize()[0].tolist() == vector["dequant"]
    values, codes, scales = quantize_dequantize(x, "nvfp4-exact", vector["g"])
    assert torch.equal(values, q.dequantize()) and torch.equal(codes, q.codes) and torch.equal(scales, q.scales)


@pytest.mark.parametrize("vector", MXFP4, ids=lambda v: v["id"])
def test_mxfp4_rceil_vector(vector):
    q = quantize(blocks([vector["x"]]), "mxfp4-rceil")
    expected = vector["results"]["flashinfer rceil"]
    assert str(q.scales.item()) == expected["e8m0"]
    assert "".join(f"{c:x}" for c in q.codes[0, :20].tolist()) == expected["codes"]
