"""Statistics of audit records: with the trainer's activations what `audit` finds, without them the records alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.errors import DataError
from tracekit.guidance.reader import GuidanceReader
from tracekit.guidance.regime import SiteAudit


def load_activations(path: Any) -> dict[tuple[str, str], np.ndarray]:
    """`{(trajectory, site): rows}` of an .npz file whose arrays are named `trajectory|site`, each float `[n, (planes,)
    K]`: the trainer's activations at that trajectory's audited tokens, in their order."""
    if not Path(path).is_file():
        raise DataError(f"{path} is not there: give an .npz of arrays named 'trajectory|site'")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {tuple(name.rsplit("|", 1)): file[name] for name in file.files}
    except ValueError as e:
        raise DataError(f"{path}: {e}; give an .npz of float arrays named 'trajectory|site'") from e
    if any(len(name) != 2 for name in arrays):
        raise DataError(f"{path}: arrays must be named 'trajectory|site', as in 't0|layers.3.moe_input'")
    return arrays


def load_audits(path: Path) -> tuple[int, dict[str, SiteAudit]]:
    """The last audited step of a run and its sums by site, as the learner wrote them."""
    if not path.is_file():
        raise DataError(
            f"{path} is not there: no token of this run was audited (guidance.audit_every is 0, its responses are few, "
            "or its engine is not the in-process one); give a folder of guidance for the records alone"
        )
    try:
        found = json.loads(path.read_text())
        return int(found["step"]), {name: SiteAudit.from_state(s) for name, s in found["sites"].items()}
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path} cannot be read ({e}): the next audited step of the run writes it anew") from e


def entropy(counts: np.ndarray) -> float:
    """Bits."""
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(p * np.log2(p)).sum())


def record_stats(reader: GuidanceReader) -> dict[str, dict[str, float]]:
    """Per site, of the audit records alone: tokens, entropy of code, low bit and scale, share of values at +-6."""
    codes: dict[str, np.ndarray] = {}
    scales: dict[str, np.ndarray] = {}
    tokens: dict[str, int] = {}
    for traj_id in reader.ids():
        for name, rows in reader.audit(traj_id).items():
            codes[name] = codes.get(name, 0) + np.bincount(rows.codes.ravel(), minlength=16)
            scales[name] = scales.get(name, 0) + np.bincount(rows.scales.ravel(), minlength=256)
            tokens[name] = tokens.get(name, 0) + len(rows.tokens)
    out = {}
    for name, c in codes.items():
        low = np.array([c[0::2].sum(), c[1::2].sum()])
        out[name] = {
            "tokens": tokens[name],
            "code_entropy": entropy(c),
            "low_bit_entropy": entropy(low),
            "scale_entropy": entropy(scales[name]),
            "saturated": float(c[[7, 15]].sum() / max(c.sum(), 1)),
        }
    return out
