"""Sums and means over the responses of a flat, packed token axis."""

import torch
from torch import Tensor


class Segments:
    """Which response each token of a flat axis belongs to.

    ids: [T] int, response of each token, -1 for a token of none (prompt, padding).
    n: number of responses; a response may have no token.
    """

    def __init__(self, ids: Tensor, n: int):
        self.ids = ids.long()
        self.n = n
        self._slot = torch.where(self.ids < 0, n, self.ids)

    def sum(self, x: Tensor) -> Tensor:
        """x [T] to [n]; tokens of no response are left out."""
        return x.new_zeros(self.n + 1).index_add(0, self._slot, x)[: self.n]

    def spread(self, y: Tensor) -> Tensor:
        """y [n] to [T]; 0 (False) for tokens of no response."""
        return torch.cat([y, y.new_zeros(1)])[self._slot]

    def max(self, x: Tensor, *, empty: float) -> Tensor:
        """x [T] to [n]; `empty` where a response has no token."""
        out = x.new_full((self.n + 1,), empty)
        return out.scatter_reduce(0, self._slot, x, "amax", include_self=True)[: self.n]

    def rank(self, mask: Tensor) -> Tensor:
        """[T] int: 0, 1, 2 … along each response's masked-in tokens (undefined where mask is false).

        The tokens of a response must be contiguous up to tokens of no response.
        """
        count = torch.cumsum(mask.long(), 0) - 1
        big = count.numel() + 1
        first = count.new_full((self.n + 1,), big)
        first = first.scatter_reduce(0, self._slot, torch.where(mask, count, big), "amin", include_self=True)
        return count - first[self._slot]
