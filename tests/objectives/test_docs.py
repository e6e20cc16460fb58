"""The concept pages and the metrics page say what the code does."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from test_properties import METHODS, full_batch

from tracekit.objectives import CORRECTIONS, LOSSES, policy_loss
from tracekit.objectives.presets import VERL_PRESETS
from tracekit.objectives.registry import CommonKnobs, correction_class, loss_class

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "concepts"
PAGE = {"token_rejection": "rejection", "sequence_rejection": "rejection"}
METHOD_PAGES = [(n, loss_class(n).Knobs) for n in LOSSES] + [
    (n, correction_class(n).Knobs) for n in CORRECTIONS if n != "none"
]


def shown(value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize(("name", "knobs"), METHOD_PAGES)
def test_page_has_formula_code_and_every_knob_with_its_default(name, knobs):
    text = (PAGES / f"{PAGE.get(name, name)}.md").read_text()
    for heading in ("## Formula", "## Code", "## Knobs", "## What is assumed", "## When to use it"):
        assert heading in text
    if name != "token_rejection":
        for field in dataclasses.fields(knobs):
            assert f"| `{field.name}` | `{shown(field.default)}` |" in text, field.name


@pytest.mark.parametrize("page", sorted(p.name for p in PAGES.glob("*.md")))
def test_quoted_code_and_links_exist(page):
    text = (PAGES / page).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    for link in links:
        assert (PAGES / link).exists(), link
    sources = [PAGES / link for link in links if link.endswith(".py")]
    if sources:
        for line in re.findall(r"```python\n(.*?)\n```", text):
            assert any(line in s.read_text() for s in sources), line


def test_common_knobs_and_presets_are_listed():
    text = (PAGES / "objectives.md").read_text()
    for field in dataclasses.fields(CommonKnobs):
        assert f"| `{field.name}` | `{shown(field.default)}` |" in text, field.name
    for name in (*LOSSES, *CORRECTIONS):
        assert name in text
    verl = (PAGES / "verl.md").read_text()
    for preset in VERL_PRESETS:
        stem = re.sub(r"(?<=rs)_(seq|token)_tis$|(?<=clip)_(geo|k3)_rs$", "", preset)
        assert f"`{stem}`" in verl, preset


def documented() -> set[str]:
    """Metric names of docs/metrics.md, with {a,b} and {1..4} expanded and `x/*` kept as a prefix."""
    names = set()
    for token in re.findall(r"`([a-z_]+/[^`]+)`", (ROOT / "docs" / "metrics.md").read_text()):
        parts = [token]
        while any("{" in p for p in parts):
            grown = []
            for p in parts:
                m = re.search(r"\{([^}]*)\}", p)
                if not m:
                    grown.append(p)
                    continue
                lo_hi = re.fullmatch(r"(\d)\.\.(\d)", m[1])
                options = map(str, range(int(lo_hi[1]), int(lo_hi[2]) + 1)) if lo_hi else m[1].split(",")
                grown += [p[: m.start()] + o + p[m.end() :] for o in options]
            parts = grown
        names |= set(parts)
    return names


def test_every_metric_is_documented():
    known = documented()
    prefixes = tuple(n[:-1] for n in known if n.endswith("*"))
    for knobs in METHODS.values():
        b = full_batch(knobs, 1).with_(version_lag=torch.tensor([0, 1, 0, 1, 0, 1]))
        objective = policy_loss(**knobs)
        objective.begin_batch([b])
        out = objective(b).metrics
        for name in [*out.finalize(), *out.histograms()]:
            if name == "hist/ratio_by_old_prob_negative":
                continue
            assert name in known or name.startswith(prefixes), name
