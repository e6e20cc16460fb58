"""What a read gives back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tracekit.errors import DataError
from tracekit.guidance.bits import unpack_rows
from tracekit.guidance.schema import SiteSpec


@dataclass(slots=True)
class SiteRecord:
    """The rows of one site over a range of tokens, `heads` being all planes unless some were asked for.

    Sites of encoding `compact`, `low2` and `rm15` hold less than the sampler's codes and scales; `decode` completes
    them with the trainer's own activations.
    """

    site: SiteSpec
    tokens: range
    codes: np.ndarray | None
    """u8 `[T, heads, ceil(K * bits / 8)]`, packed; None for bits = 0. For `rm15` the coset leaders of the codes."""
    scales: np.ndarray
    """u8 `[T, heads, K / block]`; only the low `site.scale_bits` of each where that is below 8."""
    token_scale: np.ndarray | None
    """f32 `[T]`, the encode scale of each token; None when `global_scale` holds for all."""
    global_scale: float | None
    """The static encode scale; None when it is per token."""
    checks: np.ndarray | None = None
    """u16 `[T, heads, 1 or 2]`: check of the row's whole scales and, for `rm15`, of its codes; None for `lossless`."""

    def unpack(self) -> np.ndarray:
        """u8 `[T, heads, K]`: the low bits of each code, one byte an element."""
        if self.codes is None:
            raise DataError(f"site '{self.site.name}' keeps scales only: there are no codes to unpack")
        return unpack_rows(self.codes, self.site.bits, self.site.width)


@dataclass(slots=True)
class BatchRecord:
    """The rows of one site for many requests, one after another; iterates over codes, scales and token_scale."""

    codes: np.ndarray | None
    """u8 `[sum T, heads, K]` low bits, or packed rows with `unpack=False`; None for bits = 0."""
    scales: np.ndarray
    """u8 `[sum T, heads, K / block]`."""
    token_scale: np.ndarray | None
    """f32 `[sum T]`; None when every row has the site's static `global_scale`."""
    checks: np.ndarray | None = None
    """u16 `[sum T, heads, 1 or 2]`; None for `lossless`."""
    site: SiteSpec | None = None

    def __iter__(self) -> Iterator[np.ndarray | None]:
        return iter((self.codes, self.scales, self.token_scale))


@dataclass(slots=True)
class AuditRows:
    """Audited tokens of one site: all that the sampler rounded to."""

    site: SiteSpec
    """The site with 4 bits and `lossless`; how its other rows are kept is in the schema."""
    tokens: np.ndarray
    """int64 `[n]`."""
    codes: np.ndarray
    """u8 `[n, planes, K]`, whole codes."""
    scales: np.ndarray
    """u8 `[n, planes, K / block]`."""
    token_scale: np.ndarray
    """f32 `[n]`: the encode scale, a static one repeated."""


def audit_rows(site: SiteSpec, rows: list[tuple[int, bytes, bytes, float]]) -> AuditRows:
    """Joins `(token, codes, scales, encode scale)` of one site."""
    shape = (len(rows), site.planes)
    return AuditRows(
        replace(site, bits=4, encoding="lossless"),
        np.array([r[0] for r in rows], np.int64),
        np.frombuffer(b"".join(r[1] for r in rows), np.uint8).reshape(*shape, site.width),
        np.frombuffer(b"".join(r[2] for r in rows), np.uint8).reshape(*shape, site.scale_row),
        np.array([r[3] for r in rows], np.float32),
    )
