"""Every row of fixture F1: loss and gradient to 1e-5, in every layout."""

import pytest
import torch
from objective_fixtures import f1, gradient, packed, rows

from tracekit.objectives import policy_loss, with_totals

SEQ, TOKEN = "seq-mean-token-mean", "token-mean"
# pi_theta / mu = .6 / .5 lies on the upper bound 1.2: the left derivative is -.24, the right one 0. Strict clipping
# keeps the left one; a central difference sees their mean, -.12.
KINK = -0.24
# Their loss value holds its ratio fixed, so differences of it are not its gradient.
HELD_RATIO = ("cispo", "reinforce", "minirl", "dppo_tv")
TBPO = dict(
    name="tbpo", seq_clip_ratio_high=0.2, neg_seq_clip_ratio_low=0.2, neg_seq_clip_ratio_high=0.6, band_mode="drop"
)
GRPO = dict(name="grpo", clip_ratio_low=0.2, clip_ratio_high=0.2)
ACRL = GRPO | dict(correction="acrl", gamma=0.65, is_cap=3.0)

# (label, arguments of policy_loss, loss, gradient at the five tokens)
ROWS = [
    ("grpo", GRPO, 0.313704, [0, -0.17333, -0.16296, 0.625, 0.225]),
    ("dual clip 3", GRPO | dict(clip_ratio_c=3.0), 0.313704, [0, -0.17333, -0.16296, 0.625, 0.225]),
    ("dual clip 2", GRPO | dict(clip_ratio_c=2.0), 0.188704, [0, -0.17333, -0.16296, 0, 0.225]),
    ("tis 1.1", GRPO | dict(correction="tis", is_cap=1.1), -0.161130, [0, -0.19067, -0.16296, 0.125, 0.2475]),
    (
        "tis 2 token-mean",
        GRPO | dict(correction="tis", is_cap=2.0, loss_agg_mode=TOKEN),
        -0.346556,
        [0, -0.26, -0.19556, 0.1, 0.225],
    ),
    (
        "bypass",
        dict(name="ppo", clip_ratio_low=0.2, clip_ratio_high=0.2, bypass=True, advantage="grpo"),
        -0.290556,
        [KINK, 0, -0.19556, 0, 0.225],
    ),
    ("dapo .28", dict(name="dapo"), 0.020444, [0, -0.208, -0.19556, 0.5, 0.18]),
    ("dapo .40", dict(name="dapo", clip_ratio_high=0.4), 0.009778, [-0.26667, -0.208, -0.19556, 0.5, 0.18]),
    ("dr_grpo", dict(name="dr_grpo", loss_max_length=4), 0.022778, [0, -0.13, -0.12222, 0.3125, 0.1125]),
    ("mis product 1.1", GRPO | dict(correction="mis", is_cap=1.1), 0.212500, [0, 0, 0, 0.15625, 0.05625]),
    (
        "mis product 2",
        GRPO | dict(correction="mis", is_cap=2.0),
        -0.390833,
        [0, -0.195, -0.18333, 0.15625, 0.05625],
    ),
    (
        "mis geometric 2",
        GRPO | dict(correction="mis", is_cap=2.0, mis_mean="geometric"),
        -0.132771,
        [0, -0.18027, -0.16949, 0.3125, 0.1125],
    ),
    (
        "icepop",
        GRPO | dict(correction="icepop", loss_agg_mode=TOKEN),
        -0.446556,
        [0, -0.26, -0.19556, 0, 0.225],
    ),
    (
        "token rejection, surviving",
        GRPO | dict(correction="token_rejection", loss_agg_mode=TOKEN, denominator="surviving"),
        -0.579444,
        [0, -0.26, -0.24444, 0, 0.225],
    ),
    ("gspo", dict(name="gspo"), 0.249800, [0, 0, 0, 0.375, 0.375]),
    (
        "gspo .2",
        dict(name="gspo", clip_ratio_low=0.2, clip_ratio_high=0.2),
        0.196598,
        [-0.18447, -0.18447, -0.18447, 0.375, 0.375],
    ),
    ("cispo", dict(name="cispo", clip_ratio_high=0.28), -0.474678, [-0.256, -0.208, -0.19556, 0.256, 0.18]),
    ("tbpo published bands", dict(name="tbpo"), 0.0, [0, 0, 0, 0, 0]),
    ("tbpo C=2", TBPO | dict(seq_tis_imp_ratio_cap=2.0), -0.200561, [-0.19185] * 3 + [0.1875] * 2),
    (
        "tbpo C=1.02 truncate",
        TBPO | dict(seq_tis_imp_ratio_cap=1.02, mismatch_mode="truncate"),
        -0.189470,
        [-0.18816] * 3 + [0.1875] * 2,
    ),
    (
        "tbpo C=1.02 drop",
        TBPO | dict(seq_tis_imp_ratio_cap=1.02, mismatch_mode="drop"),
        0.375000,
        [0, 0, 0, 0.1875, 0.1875],
    ),
    (
        "opsm mu",
        GRPO | dict(correction="opsm", opsm_delta=0.1, opsm_reference="mu"),
        -0.536296,
        [0, -0.17333, -0.16296, 0, 0],
    ),
    (
        "opsm old",
        GRPO | dict(correction="opsm", opsm_delta=1e-4, opsm_reference="old"),
        0.313704,
        [0, -0.17333, -0.16296, 0.625, 0.225],
    ),
    ("acrl .05", ACRL | dict(x_reference=0.05), -0.017031, [0, -0.18192, -0.16296, 0.27065, 0.25268]),
    ("acrl .013", ACRL | dict(x_reference=0.013), 0.008780, [0, -0.13815, -0.16296, 0.00127, 0.53123]),
    (
        "acrl group",
        ACRL | dict(x_reference=0.05, y_level="group"),
        0.188627,
        [0, -0.16757, -0.16296, 0.48963, 0.23275],
    ),
    (
        "acrl batch",
        ACRL | dict(x_reference=0.05, y_level="batch"),
        0.188627,
        [0, -0.16757, -0.16296, 0.48963, 0.23275],
    ),
    (
        "acrl continuous",
        ACRL | dict(x_reference=0.05, acrl_variant="continuous"),
        -0.117602,
        [0, -0.13867, -0.16296, 0.125, 0.28125],
    ),
    (
        "acrl fallback",
        ACRL | dict(x_reference=0.05, acrl_variant="fallback"),
        -0.012959,
        [0, -0.17333, -0.16296, 0.27065, 0.25268],
    ),
    (
        "acrl measure",
        ACRL | dict(x_reference=0.05, acrl_variant="measure"),
        0.313704,
        [0, -0.17333, -0.16296, 0.625, 0.225],
    ),
]
row = pytest.mark.parametrize(("knobs", "loss", "grad"), [pytest.param(*r[1:], id=r[0]) for r in ROWS])


def check(got, loss, grad):
    total, auto, coefficients = got[:3]
    torch.testing.assert_close(total.double(), torch.tensor(loss, dtype=torch.float64), atol=1e-5, rtol=0)
    expected = torch.tensor(grad, dtype=torch.float64)
    torch.testing.assert_close(auto.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(coefficients.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(coefficients, auto, atol=1e-6, rtol=1e-6)


@row
def test_padded(knobs, loss, grad):
    objective = policy_loss(**knobs)
    objective.begin_batch([f1()])
    check(gradient(objective, f1()), loss, grad)


@row
def test_packed_behind_nan(knobs, loss, grad):
    objective = policy_loss(**knobs)
    objective.begin_batch([packed(f1())])
    check(gradient(objective, packed(f1())), loss, grad)


@row
def test_one_response_a_microbatch(knobs, loss, grad):
    objective = policy_loss(**knobs)
    parts = [rows(f1(), slice(0, 1)), packed(rows(f1(), slice(1, 2)))]
    objective.begin_batch(parts)
    parts = with_totals(parts, objective.totals(parts))
    got = [gradient(objective, part) for part in parts]
    check((sum(g[0] for g in got), torch.cat([g[1] for g in got]), torch.cat([g[2] for g in got])), loss, grad)


@pytest.mark.parametrize(
    ("knobs", "loss", "grad"),
    [pytest.param(*r[1:], id=r[0]) for r in ROWS if r[1]["name"] not in HELD_RATIO],
)
def test_central_difference(knobs, loss, grad):
    """The gradient of the row against finite differences in fp64, across the kink of `bypass` too."""
    objective = policy_loss(**knobs)
    batch = f1(torch.float64)
    objective.begin_batch([batch])
    numeric, h = [], 1e-6
    for i, j in batch.mask.nonzero().tolist():
        value = []
        for sign in (1, -1):
            moved = batch.logp.detach().clone()
            moved[i, j] += sign * h
            value.append(float(objective(batch.with_(logp=moved)).loss))
        numeric.append((value[0] - value[1]) / (2 * h))
    expected = [KINK / 2 if g == KINK else g for g in grad]
    assert numeric == pytest.approx(expected, abs=1e-5)
