"""The audited tokens of a step meet the learner's own activations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracekit.errors import DataError
from tracekit.guidance import Audit, AuditRows, GuidanceReader, SiteAudit
from tracekit.rollout.protocol import Rollouts
from tracekit.runs import write_atomic


class StepAudit:
    """Collects what enters the quantiser at each recorded site for the audited tokens of a step.

    The tokens of a prompt are taken once for their group. `begin` before a microbatch's forward, `take` from its
    guided modules, `finish` at the end.
    """

    def __init__(self, reader: GuidanceReader, rollouts: Rollouts) -> None:
        self.reader = reader
        self._rows: dict[str, list[AuditRows]] = {}
        self._uids: dict[str, list[np.ndarray]] = {}
        self._find(rollouts)
        uids = [u for parts in self._uids.values() for u in parts]
        self._wanted = np.unique(np.concatenate(uids)) if uids else np.zeros(0, np.int64)
        self._at = torch.zeros(0, dtype=torch.int64)
        self._seen: list[np.ndarray] = []
        self._x: dict[str, list[torch.Tensor]] = {}

    def _find(self, rollouts: Rollouts) -> None:
        """The records of each row's own tokens, and of each prompt under the first row that has it."""
        prompts = set()
        for row, traj_id in enumerate(rollouts.trajectory):
            owners = [traj_id]
            prefix = self.reader[traj_id].prefix
            if prefix and prefix[0] not in prompts:
                prompts.add(prefix[0])
                owners.append(prefix[0])
            for owner in owners:
                for site, rows in self.reader.audit(owner).items():
                    self._rows.setdefault(site, []).append(rows)
                    self._uids.setdefault(site, []).append((row << 32) | rows.tokens)

    def begin(self, token_uid: torch.Tensor) -> None:
        """The microbatch whose forward comes next; `token_uid` of any shape, -1 for padding."""
        uid = token_uid.reshape(-1).cpu().numpy()
        at = np.flatnonzero(np.isin(uid, self._wanted))
        self._seen.append(uid[at])
        self._at = torch.from_numpy(at).to(token_uid.device)

    def take(self, site: str, x: torch.Tensor) -> None:
        """`x` [T, planes, K] of the microbatch's flattened tokens, as it enters the quantiser."""
        if len(self._at):
            self._x.setdefault(site, []).append(x.detach()[self._at])

    def finish(self) -> dict[str, SiteAudit]:
        """What the audit tells of each site; empty where no token of the step is audited."""
        sums = Audit()
        seen = np.concatenate(self._seen) if self._seen else np.zeros(0, np.int64)
        order = np.argsort(seen)
        for site, x in self._x.items():
            if site not in self._rows:
                continue
            uids = np.concatenate(self._uids[site])
            place = np.searchsorted(seen[order], uids)
            if not np.array_equal(seen[order][np.minimum(place, len(seen) - 1)], uids):
                raise DataError(f"site '{site}': the step's microbatches lack audited tokens of its guidance")
            sums.add(torch.cat(x)[torch.from_numpy(order[place])], _joined(self._rows[site]), bits=self.bits(site))
        return sums.sites

    def bits(self, site: str) -> int:
        """Low bits that the site keeps of other tokens."""
        return self.reader.site(site).bits


def _joined(rows: list[AuditRows]) -> AuditRows:
    names = ("tokens", "codes", "scales", "token_scale")
    return AuditRows(rows[0].site, *(np.concatenate([getattr(r, name) for r in rows]) for name in names))


def audit_metrics(sites: Mapping[str, SiteAudit]) -> dict[str, float]:
    """`guidance/audit_*` of a step, over all sites; nothing where no token was audited."""
    if not sites:
        return {}
    whole = SiteAudit(0)
    for s in sites.values():
        whole.merge(s)
    out = {"guidance/audit_flip_rate": whole.flip_rate, "guidance/audit_adjacency": whole.adjacency}
    sigma = whole.sigma
    return out | ({"guidance/audit_sigma": sigma} if math.isfinite(sigma) else {})


def add_audits(state: dict[str, Any], sites: Mapping[str, SiteAudit]) -> None:
    """Adds a step's audits to a run's sums, `{site: SiteAudit.state_dict()}`."""
    for name, s in sites.items():
        total = SiteAudit.from_state(state[name]) if name in state else SiteAudit(s.bits)
        total.merge(s)
        state[name] = total.state_dict()


def write_audits(path: Path, step: int, state: Mapping[str, Any]) -> None:
    """The run's sums up to `step`, for `tracekit guidance stats RUN`."""
    write_atomic(path, json.dumps({"step": step, "sites": state}) + "\n")
