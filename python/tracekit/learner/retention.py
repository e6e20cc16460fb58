"""Which steps' guidance stays on disk while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tracekit.config.schema import GuidanceConfig
from tracekit.guidance import GuidanceBudget


class Retention:
    """Deletes guidance that no step will read again.

    Without `guidance.byte_budget` the last `guidance.keep_steps` steps stay. With one, a step's guidance stays until a
    checkpoint holds what was learnt from it; a step that would not fit waits for a checkpoint that comes early.
    """

    def __init__(self, config: GuidanceConfig, root: Path, note: Callable[[str], None] = print) -> None:
        """`root` has a folder `step_XXXXXX` a step; `note` shows a person a line."""
        self.root, self.keep, self.note = root, config.keep_steps, note
        self.budget = GuidanceBudget(root, config.byte_budget) if config.byte_budget else None

    def adopt(self, step: int, expected: int) -> None:
        """Enter a run whose last checkpoint is of `step`, and whose largest step so far wrote `expected` bytes.
        Folders of later steps go: those steps are sampled again."""
        if self.budget is None:
            return
        for trash in self.root.glob(".deleted-*"):
            shutil.rmtree(trash)
        for folder in sorted(self.root.glob("step_*")):
            number = int(folder.name.removeprefix("step_"))
            if number > step:
                self.note(f"{folder} is of a step after the checkpoint, which is sampled again: removed")
                shutil.rmtree(folder)
            else:
                self.budget.retain(folder.name)
                self.budget.consumed(number, folder.name)
        self.budget.expect(expected)
        self.budget.checkpointed(step, self.keep)

    def wait_room(self, expected: int) -> None:
        """Hold a step back until `expected` bytes fit. DataError if that takes more than the checkpoints there are:
        nothing else of this process could make room."""
        if self.budget is not None:
            self.budget.wait_room(expected, timeout=0)

    def read(self, step: int, folders: list[Path], expected: int) -> dict[str, float]:
        """`step` has read `folders` for the last time, and the next is going to write `expected` bytes. Returns
        metrics."""
        if self.budget is None:
            self._prune(step)
            return {}
        for folder in folders:
            self.budget.retain(folder.name)
            self.budget.consumed(step, folder.name)
        self.budget.expect(expected)
        used, early = self.budget.usage(), self.wants_checkpoint
        return {
            "guidance/disk_bytes": used,
            "guidance/budget_frac": used / self.budget.byte_budget,
            "guidance/early_checkpoint": int(early),
        }

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the next step fits only after a checkpoint."""
        return self.budget is not None and self.budget.wants_checkpoint

    def checkpointed(self, step: int) -> None:
        """A complete checkpoint of `step` is on disk."""
        if self.budget is not None:
            self.budget.checkpointed(step, self.keep)

    def _prune(self, step: int) -> None:
        if self.keep < 0:
            return
        for folder in self.root.glob("step_*"):
            if int(folder.name.removeprefix("step_")) <= step - self.keep:
                shutil.rmtree(folder)
