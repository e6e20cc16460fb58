"""How far the sampler's recorded rounding is from the learner's own, site by site."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit import numerics

if TYPE_CHECKING:
    from tracekit.learner.guide import SiteRecord


class SiteGaps:
    """Sums over the recorded tokens of many microbatches; `metrics()` are `mismatch/by_layer/{layer}/{kind}/*`.

    codes_differ_frac   share of values whose recorded low bits are not those of the learner's own code
    scales_differ_frac  share of blocks whose recorded scale is not the learner's own
    rel_diff            |guided - own| / |own| over the site's values, Euclidean
    """

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None
        """Bool [T]: tokens of the current microbatch that are not padding."""
        self._sums: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(
        self,
        site: str,
        x: torch.Tensor,
        guided: torch.Tensor,
        record: SiteRecord,
        *,
        profile: str,
        scale: torch.Tensor | None,
    ) -> None:
        """Count one microbatch: `x` [T, planes, K] at the site, what guidance made of it, the learner's own scale."""
        own, codes, scales = numerics.quantize_dequantize(x.detach(), profile, global_scale=scale)
        at = torch.ones(len(x), dtype=torch.bool, device=x.device) if self.real is None else self.real
        own, out, scales = own[at].double(), guided.detach()[at].double(), scales[at]
        zero = own.new_zeros(())
        differ, values = zero, zero
        if record.codes is not None and record.bits:
            wrong = numerics.low_bits(codes[at], record.bits) != record.low_bits(x.shape[-1])[at]
            differ, values = wrong.sum().double(), zero + wrong.numel()
        parts = [
            differ,
            values,
            (scales != record.scales[at]).sum().double(),
            zero + scales.numel(),
            (out - own).square().sum(),
            own.square().sum(),
        ]
        sums = torch.stack(parts)
        self._sums[site] = self._sums[site] + sums if site in self._sums else sums

    def metrics(self) -> dict[str, float]:
        """The three numbers of each site; a site without codes (scales only) has no `codes_differ_frac`."""
        out = {}
        for site, sums in self._sums.items():
            _, layer, kind = site.split(".")
            differ, values, scales, blocks, gap, norm = sums.tolist()
            pairs = {
                "codes_differ_frac": (differ, values),
                "scales_differ_frac": (scales, blocks),
                "rel_diff": (gap**0.5, norm**0.5),
            }
            for name, (part, whole) in pairs.items():
                if whole:
                    out[f"mismatch/by_layer/{layer}/{kind}/{name}"] = part / whole
        return out
