"""Metrics of the gap between sampler and learner: `mismatch/*` (definitions and ranges in docs/metrics.md).

All over valid tokens, lam = logp_old - logp_mu (learner minus sampler), before any clipping, also in bypass mode.
"""

import torch
from torch import Tensor

from tracekit.objectives.metrics import Metrics
from tracekit.objectives.terms import Terms, safe_exp

POSITION_EDGES = (0, 16, 64, 256, 1024, 4096)
"""First position (counted in sampled tokens of the response) of each bucket."""
DIFFERS = 1e-6
"""|lam| above this counts as a token whose log-prob differs."""


def position_names() -> list[str]:
    """Names of the buckets: `0-15`, …, `4096+`."""
    ends = [f"-{b - 1}" for b in POSITION_EDGES[1:]] + ["+"]
    return [f"{a}{end}" for a, end in zip(POSITION_EDGES, ends, strict=True)]


def record_mismatch(m: Metrics, t: Terms, *, full: bool = True) -> None:
    """Add the family to `m`; `full` adds position buckets and on-policy splits."""
    live = t.live
    lam = t.learner_old - t.mu
    rho = safe_exp(lam)
    p, q = torch.exp(t.learner_old), torch.exp(t.mu)
    gap = (p - q).abs()
    token = {
        "k1": -lam,
        "k2": lam * lam / 2,
        "k3": rho - 1 - lam,
        "abs": lam.abs(),
        "expabs": safe_exp(lam.abs()),
        "gap": gap,
        "gap2": gap * gap,
        "rho": rho,
        "rho2": rho * rho,
        "differs": (lam.abs() > DIFFERS).to(lam.dtype),
        "p": p,
        "q": q,
        "pp": p * p,
        "qq": q * q,
        "pq": p * q,
    }
    m.token_sums("mismatch", token, live)
    for name, column in {
        "kl_k1": "k1",
        "kl_k2": "k2",
        "kl_k3": "k3",
        "logprob_abs_diff_mean": "abs",
        "exp_abs_diff_mean": "expabs",
        "prob_diff_mean": "gap",
        "ratio_raw_mean": "rho",
        "tokens_differ_frac": "differs",
    }.items():
        m.recipe(f"mismatch/{name}", "mean", f"mismatch:{column}", "mismatch:n")
    m.recipe("mismatch/prob_diff_std", "std", "mismatch:gap", "mismatch:gap2", "mismatch:n")
    m.recipe("mismatch/ratio_raw_std", "std", "mismatch:rho", "mismatch:rho2", "mismatch:n")
    m.recipe("mismatch/ess", "ess", "mismatch:rho", "mismatch:rho2", "mismatch:n")
    m.recipe("mismatch/chi2_token", "chi2", "mismatch:rho2", "mismatch:n")
    m.recipe("mismatch/pearson", "pearson", *(f"mismatch:{c}" for c in ("p", "q", "pp", "qq", "pq", "n")))
    extremes = {
        "mismatch/logprob_abs_diff_max": lam.abs(),
        "mismatch/logprob_diff_max": lam,
        "-mismatch/logprob_diff_min": -lam,
        "mismatch/prob_diff_max": gap,
        "mismatch/ratio_raw_max": rho,
        "-mismatch/ratio_raw_min": -rho,
    }
    m.maxima("mismatch", extremes, live)
    _record_responses(m, t, lam, gap)
    if full:
        _record_positions(m, t, {"logprob_abs_diff_mean": lam.abs(), "kl_k3": rho - 1 - lam})
        if t.batch.version_lag is not None:
            _record_lag(m, t, lam, rho)


def _record_responses(m: Metrics, t: Terms, lam: Tensor, gap: Tensor) -> None:
    counted = t.seg.sum(t.live.to(lam.dtype)) > 0
    product = safe_exp(t.total(lam))
    log_train, log_rollout = -t.mean(t.learner_old), -t.mean(t.mu)
    diff = log_train - log_rollout
    y = t.mean(gap)
    values = {
        "mismatch/ppl_train": torch.exp(log_train),
        "mismatch/ppl_rollout": torch.exp(log_rollout),
        "mismatch/ppl_ratio": torch.exp(diff),
        "mismatch/log_ppl_diff": diff,
        "mismatch/log_ppl_abs_diff": diff.abs(),
        "mismatch/seq_prob_diff_mean": y,
    }
    m.means("responses", values, counted)
    m.token_sums("products", {"w": product, "ww": product * product}, counted)
    m.recipe("mismatch/chi2_seq", "chi2", "products:ww", "products:n")
    m.recipe("mismatch/ess_seq", "ess", "products:w", "products:ww", "products:n")
    extremes = {
        "mismatch/log_ppl_diff_max": diff,
        "-mismatch/log_ppl_diff_min": -diff,
        "mismatch/seq_prob_diff_max": y,
        "-mismatch/seq_prob_diff_min": -y,
    }
    m.maxima("responses", extremes, counted)


def _record_positions(m: Metrics, t: Terms, values: dict[str, Tensor]) -> None:
    names = position_names()
    edges = torch.tensor(POSITION_EDGES[1:], device=t.old.device)
    bucket = torch.where(t.live, torch.bucketize(t.seg.rank(t.valid), edges, right=True), len(names))
    zeros = t.old.new_zeros(len(names) + 1, dtype=torch.float64)
    count = zeros.index_add(0, bucket, torch.ones_like(t.old, dtype=torch.float64))
    m.sums("position:n", dict(zip(names, count, strict=False)))
    for key, x in values.items():
        total = zeros.index_add(0, bucket, x.detach().double())
        m.sums(f"position:{key}", dict(zip(names, total, strict=False)))
        for name in names:
            m.recipe(f"mismatch/by_position/{name}/{key}", "mean", f"position:{key}:{name}", f"position:n:{name}")


def _record_lag(m: Metrics, t: Terms, lam: Tensor, rho: Tensor) -> None:
    lag = t.seg.spread(t.batch.version_lag.to(lam.dtype))
    for name, where in (("on_policy", lag <= 0), ("stale", lag > 0)):
        values = {
            f"mismatch/{name}/logprob_abs_diff_mean": lam.abs(),
            f"mismatch/{name}/kl_k3": rho - 1 - lam,
            f"mismatch/{name}/prob_diff_mean": (torch.exp(t.learner_old) - torch.exp(t.mu)).abs(),
        }
        m.means(f"lag:{name}", values, t.live & where)
