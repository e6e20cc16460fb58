"""The order in which training problems are drawn."""

from __future__ import annotations

import random
from typing import Any

from tracekit.errors import DataError


class PromptSampler:
    """Indices into `size` training problems: every problem once an epoch, each epoch in another order.

    The order depends on (size, seed) only; `state_dict` continues it exactly. `fingerprint` (`Task.fingerprint`)
    travels with the state, so that a run is never continued on other data.
    """

    def __init__(self, size: int, seed: int, fingerprint: str = "") -> None:
        self.size, self.seed, self.fingerprint = size, seed, fingerprint
        self._drawn = 0
        self._epoch, self._order = -1, []

    def next(self, count: int) -> list[int]:
        """The next `count` indices."""
        drawn = []
        while len(drawn) < count:
            epoch, start = divmod(self._drawn, self.size)
            some = self._order_of(epoch)[start : start + count - len(drawn)]
            drawn += some
            self._drawn += len(some)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands."""
        return {"drawn": self._drawn, "size": self.size, "seed": self.seed, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError if it belongs to other data or another seed."""
        mine = self.state_dict()
        changed = [key for key in ("size", "seed", "fingerprint") if state.get(key) != mine[key]]
        if changed:
            raise DataError(
                f"the checkpoint's prompts are not this run's: {', '.join(changed)} differ\n"
                "resume with the task, seed and reasoning-gym version that the run was started with"
            )
        self._drawn = int(state["drawn"])

    def _order_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.size))
            random.Random(f"prompts {self.seed} {epoch}").shuffle(self._order)
        return self._order
