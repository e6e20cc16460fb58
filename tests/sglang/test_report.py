"""The comparison of both engines, small: it fails by itself where a record is not a function of the activations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "benches" / "sglang_vs_inprocess.py"


def test_guidance_differs_only_as_activations_do(tmp_path):
    command = [sys.executable, str(SCRIPT), "--prompts", "16", "--new", "8", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    for kind in ("problems", "random"):
        sites = figures[kind]["sites"]
        assert all(row["values_of_equal_activation_and_scale"] > 0 for row in sites.values())
        assert sites["layers.0.v"]["equal_codes"] == 1.0
        assert min(row["equal_codes"] for row in sites.values()) > 0.75
        for row in sites.values():  # neither is further from the truth than the other
            assert 0.7 < row["sglang_to_fp32"] / row["in_process_to_fp32"] < 1.5
        assert figures[kind]["equal_routing"] > 0.9
