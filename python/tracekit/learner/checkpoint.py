"""Checkpoints: torchtitan writes them, a marker written last makes them complete."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from tracekit.errors import DataError
from tracekit.learner.learner import Learner
from tracekit.runs import RunFolder, write_complete

from torchtitan.components.checkpointer import CheckpointManager  # isort: skip


class _Manager(CheckpointManager):
    """torchtitan's manager under the run folder's names."""

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(Path(folder or self.folder) / f"step_{step:06d}")


class Checkpoints:
    """Saves and loads model, optimizer, schedule, the prompt sampler, the loop's state and the critic's."""

    def __init__(self, run: RunFolder, learner: Learner, *, sampler, state, critic=None, keep: int) -> None:
        self.run, self.keep = run, keep
        config = _Manager.Config(
            enable=True,
            folder=run.checkpoints.name,
            interval=1,
            keep_latest_k=0,
            last_save_model_only=False,
        )
        self._manager = _Manager(
            config,
            dataloader=sampler,
            model_parts=[learner.model],
            optimizers=learner.optimizers,
            lr_schedulers=learner.schedulers,
            states={"train_state": state} if critic is None else {"train_state": state, "critic": critic},
            sd_adapter=None,
            base_folder=str(run.path.resolve()),
        )

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`, mark it complete, remove those beyond `keep`."""
        folder = self.run.checkpoint_dir(step)
        try:
            self._manager.save(step)
            write_complete(folder)
        except (CheckpointException, OSError) as error:
            raise DataError(
                f"cannot write the checkpoint {folder}: {_reason(error)}; make room or mend the disk, then --resume"
            ) from error
        self.run.prune_checkpoints(self.keep)

    def load(self, folder: Path) -> None:
        """Restore everything from a complete checkpoint. Raises DataError for one that cannot be read."""
        try:
            self._manager.load(step=int(folder.name.removeprefix("step_")))
        except CheckpointException as error:
            raise DataError(
                f"cannot read the checkpoint {folder}: {_reason(error)}; remove it and --resume from an older one"
            ) from error


def _reason(error: BaseException) -> str:
    """The first failure that a checkpoint's ranks report, in one line."""
    failures = getattr(error, "failures", None) or {}
    first = next(iter(failures.values()), (error,))
    text = " ".join(str(first[0] if isinstance(first, tuple) else first).split())
    return text[:160] or type(error).__name__
