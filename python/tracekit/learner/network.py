"""A model and its guided forward over packed rows: the policy, the reference and a critic of its own are each one."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from tracekit.config.schema import Config
from tracekit.errors import DataError
from tracekit.learner.model import build_model, experts_of  # installs the compat patches first

from tracekit.learner.attention import packed_mask  # isort: skip
from tracekit.learner.guide import Guide, guided
from tracekit.learner.logprobs import LogProbs, chunks, scatter, token_logprobs
from tracekit.learner.packing import Microbatch


class Network:
    """A model on one device. `refresh` rounds its experts; every forward until the next call uses that rounding."""

    def __init__(self, config: Config, vocab_size: int, *, device: torch.device) -> None:
        self.config, self.device, self.vocab_size = config, device, vocab_size
        self.model = build_model(config.model, vocab_size, seed=config.seed, device=device)
        self.experts = experts_of(self.model)
        self.experts_profile = None if config.quant.experts == "none" else config.quant.experts
        self.refresh()

    def refresh(self) -> None:
        """Round the experts' weights for the forwards up to the next change of the weights."""
        for experts in self.experts.values():
            experts.refresh(
                self.experts_profile,
                power_of_two=self.config.rollout.engine == "sglang",
                codes=self.config.quant.forward == "hardware",
            )

    # -- forward

    def logits(self, batch: Microbatch) -> torch.Tensor:
        """[B, L, V] under the active guide."""
        return self.model(batch.tokens, batch.positions, packed_mask(batch.group_ids, batch.segment_ids))

    def hidden(self, batch: Microbatch) -> torch.Tensor:
        """[B, L, D] after the last norm, under the active guide: what the head reads."""
        self.model._skip_lm_head = True
        try:
            return self.logits(batch)
        finally:
            self.model._skip_lm_head = False

    def logp(self, batch: Microbatch, guide: Guide, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each label at the sampling temperature, and the entropy there; both [B, L] float32.

        With `optim.logit_chunk_tokens` they are 0 where the mask is false.
        Only for rounding to be repeated in backward does the caller hold `guided(guide)` around both.
        """
        with guided(guide):
            hidden = self.hidden(batch)
        out = self.logprobs(hidden, batch, temperature=temperature)
        return out.logp, out.entropy

    def logprobs(
        self,
        hidden: torch.Tensor,
        batch: Microbatch,
        *,
        temperature: float,
        entropy_grad: bool = False,
        topk: bool = False,
    ) -> LogProbs:
        """What the head says about `hidden` [B, L, D]: of whole rows, or of the masked tokens chunk by chunk.

        Chunks bound the memory only where no graph keeps them: `learner.logprobs.chunked_backward` for the rest.
        """
        size = self.config.optim.logit_chunk_tokens
        if not size:
            return token_logprobs(
                self.model.lm_head(hidden),
                batch.labels,
                temperature=temperature,
                entropy_grad=entropy_grad,
                topk_ids=batch.topk_ids if topk else None,
            )
        pieces = chunks(batch.mask, size)
        parts = [
            self.piece_logprobs(
                hidden.flatten(0, 1)[piece],
                batch,
                piece,
                temperature=temperature,
                entropy_grad=entropy_grad,
                topk=topk,
            )
            for piece in pieces
        ]

        def whole(name: str) -> torch.Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else scatter(batch.mask.shape, pieces, values)

        return LogProbs(logp=whole("logp"), entropy=whole("entropy"), topk=whole("topk"))

    def piece_logprobs(
        self,
        hidden: torch.Tensor,
        batch: Microbatch,
        piece: torch.Tensor,
        *,
        temperature: float,
        entropy_grad: bool = False,
        topk: bool = False,
    ) -> LogProbs:
        """The same for the tokens at the flat indices `piece` [P] alone, of which `hidden` is [P, D]."""
        ids = batch.topk_ids.flatten(0, 1)[piece][None] if topk else None
        out = token_logprobs(
            self.model.lm_head(hidden[None]),
            batch.labels.reshape(-1)[piece][None],
            temperature=temperature,
            entropy_grad=entropy_grad,
            topk_ids=ids,
        )
        return LogProbs(
            logp=out.logp[0],
            entropy=out.entropy[0],
            topk=None if out.topk is None else out.topk[0],
        )

    # -- weights on disk

    def save_weights(self, path: Path) -> None:
        """Model weights alone."""
        partial = path.with_suffix(".tmp")
        torch.save(self.model.state_dict(), partial)
        partial.replace(path)

    def load_weights(self, path: Path) -> None:
        """Weights that `save_weights` wrote. Raises DataError when they are of another model."""
        try:
            self.model.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            first = str(error).splitlines()[0]
            raise DataError(
                f"{path} does not hold this model's weights ({first}): delete it to train them again"
            ) from None
        self.refresh()
