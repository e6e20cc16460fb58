"""What a checkpoint holds of the loop, and the signals that end it."""

from __future__ import annotations

import io
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(kw_only=True, slots=True)
class LoopState:
    """What a checkpoint holds beside model, optimizer, schedule and sampler."""

    step: int = 0
    """Completed steps."""
    version: int = 0
    """Policy version that the engine serves."""
    static_scales: dict[str, float] = field(default_factory=dict)
    """Calibrated encode scale of each site."""
    objective: dict[str, Any] = field(default_factory=dict)
    """The objective's state, for those that keep one."""
    before: dict[str, float] = field(default_factory=dict)
    """Evaluation at the end of the warm start."""
    guidance_bytes: int = 0
    """Guidance of the largest step so far."""
    audits: dict[str, Any] = field(default_factory=dict)
    """Sums over the audited tokens of all steps, by site."""

    def state_dict(self) -> dict[str, Any]:
        """One pickled blob: a distributed checkpoint restores only the keys that exist when it is loaded, and these
        dictionaries are still empty then."""
        blob = io.BytesIO()
        torch.save({name: getattr(self, name) for name in self.__slots__}, blob)
        return {"blob": blob.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = torch.load(io.BytesIO(state["blob"]), weights_only=True)
        for name in self.__slots__:
            if name in values:  # an older version's checkpoint has fewer
                setattr(self, name, values[name])


class Interrupt:
    """Turns the first SIGINT or SIGTERM into `requested`, so that a step ends before the run does."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
