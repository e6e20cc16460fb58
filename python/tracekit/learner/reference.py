"""The reference policy of KL terms: the weights at the end of the warm start, frozen and kept with the run."""

from __future__ import annotations

from tracekit.config.schema import Config
from tracekit.errors import DataError
from tracekit.learner.learner import Learner
from tracekit.learner.network import Network
from tracekit.runs import RunFolder, check_complete, write_complete


class Reference(Network):
    """A frozen policy. Its forward is guided by the same records and routes as the learner's, so that the KL is 0 as
    long as the weights are equal."""

    def __init__(self, config: Config, learner: Learner, run: RunFolder, *, fresh: bool) -> None:
        """`fresh` takes the learner's weights and writes them to the run's folder; otherwise they are read there.

        Raises DataError when they are not there.
        """
        super().__init__(config, learner.vocab_size, device=learner.device)
        folder = run.checkpoints / "reference"
        if fresh:
            folder.mkdir(parents=True, exist_ok=True)
            learner.save_weights(folder / "weights.pt")
            write_complete(folder)
        elif problem := check_complete(folder):
            raise DataError(f"{folder}: the run's reference policy cannot be read, {problem}; start over with --clean")
        self.load_weights(folder / "weights.pt")
        self.model.requires_grad_(False)
