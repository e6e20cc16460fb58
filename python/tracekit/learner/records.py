"""From the guidance store to the learner's microbatch."""

from __future__ import annotations

import numpy as np
import torch

from tracekit.errors import DataError
from tracekit.guidance import GuidanceReader
from tracekit.learner.guide import DeviceSiteRecord, EncodedRecord, SiteRecord, spread
from tracekit.learner.packing import Microbatch
from tracekit.rollout.protocol import Rollouts


def runs_of(token_uid: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Runs of consecutive uids in a flat array: (position, row, first token, length) each; padding (-1) is skipped."""
    at = np.flatnonzero(token_uid >= 0)
    if not len(at):
        return []
    uid = token_uid[at]
    breaks = np.flatnonzero((np.diff(uid) != 1) | (np.diff(at) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(at)]])
    return [
        (int(at[a]), int(uid[a] >> 32), int(uid[a] & 0xFFFFFFFF), int(b - a))
        for a, b in zip(starts, stops, strict=True)
    ]


def load_records(
    reader: GuidanceReader,
    batch: Microbatch,
    rollouts: Rollouts,
    sites: list[str],
    *,
    on_device: bool | None = None,
) -> dict[str, SiteRecord | EncodedRecord | DeviceSiteRecord]:
    """The records of every token in `batch`, addressed by `token_uid` and checked against its token ids.

    `on_device` (default: where the batch is on a GPU) uploads them packed as they are stored, to be completed and
    rounded under by kernels there; otherwise the host unpacks them. Both round alike.

    Raises DataError for a missing trajectory or for tokens that are not those the record was made of.
    """
    uid = batch.token_uid.reshape(-1).cpu().numpy()
    runs = runs_of(uid)
    where = np.concatenate([np.arange(at, at + n) for at, _, _, n in runs])
    _check_tokens(batch.tokens.reshape(-1).cpu().numpy()[where], uid[where], rollouts)
    device = batch.tokens.device
    on_device = device.type == "cuda" if on_device is None else on_device
    read = reader.read_batch(
        [rollouts.trajectory[row] for _, row, _, _ in runs],
        starts=np.array([first for _, _, first, _ in runs]),
        stops=np.array([first + n for _, _, first, n in runs]),
        sites=sites,
        token_ids=[rollouts.tokens[row, : rollouts.n_input[row] + 1] for _, row, _, _ in runs],
        unpack=not on_device,
    )
    index = torch.from_numpy(where).to(device)
    total = len(uid)

    def scatter(a: np.ndarray | None) -> torch.Tensor | None:
        return None if a is None else spread(torch.from_numpy(a).to(device), index, total)

    records = {}
    for site in sites:
        stored, spec = read[site], reader.site(site)
        if stored.token_scale is None:
            global_scale = torch.tensor(spec.global_scale, device=device)
        else:
            global_scale = _positive(scatter(stored.token_scale))[:, None, None]
        if on_device:
            from tracekit.kernels import DeviceRecord

            records[site] = DeviceSiteRecord(
                stored=DeviceRecord.of(stored, device), at=index, total=total, global_scale=global_scale
            )
        elif stored.checks is not None:
            records[site] = EncodedRecord(stored=stored, at=index, total=total, global_scale=global_scale)
        else:
            records[site] = SiteRecord(
                codes=scatter(stored.codes), scales=scatter(stored.scales), bits=spec.bits, global_scale=global_scale
            )
    return records


def _check_tokens(tokens: np.ndarray, uid: np.ndarray, rollouts: Rollouts) -> None:
    """`tokens` must be those that `uid` addresses; the store then checks that they are those of its record."""
    row, at = uid >> 32, uid & 0xFFFFFFFF
    wrong = np.flatnonzero(rollouts.tokens[row, at] != tokens)
    if len(wrong):
        first = wrong[0]
        raise DataError(
            f"token {at[first]} of trajectory {rollouts.trajectory[row[first]]} is not the one its uid names: "
            "the batch was reordered without its token_uid"
        )


def _positive(token_scale: torch.Tensor) -> torch.Tensor:
    """Padding has no scale of its own; any positive one will do, since its block scales are zero."""
    return torch.where(token_scale > 0, token_scale, torch.ones_like(token_scale))
