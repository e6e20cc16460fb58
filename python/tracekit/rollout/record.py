"""From an engine's capture to the guidance store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tracekit import numerics
from tracekit.config import guided_sites
from tracekit.config.schema import Config
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec
from tracekit.rollout.cache import Capture
from tracekit.rollout.protocol import Rollouts


def make_schema(config: Config, static_scales: dict[str, torch.Tensor] | None) -> GuidanceSchema:
    """Profile, block, bits, width and global scale of each site that the run records."""
    specs = []
    for site in guided_sites(config):
        static = None
        if not numerics.profile_info(site.profile).has_global:
            static = 1.0
        elif static_scales is not None:
            static = float(static_scales[site.name])
        specs.append(
            SiteSpec(
                name=site.name,
                planes=site.planes,
                width=site.width,
                profile=site.profile,
                block=site.block,
                bits=0 if config.guidance.mode == "scale_only" else config.guidance.bits,
                global_scale=static,
            )
        )
    return GuidanceSchema(sites=specs, user={"run": config.name})


def write_guidance(
    folder: Path,
    schema: GuidanceSchema,
    capture: Capture,
    rollouts: Rollouts,
    *,
    step: int,
    encoding: str,
    first_prompt: int = 0,
    audit_every: int = 0,
) -> None:
    """Write records of a step to `folder` and name each row's trajectory in `rollouts`.

    A group's prompt is a record of its own; its siblings name it as their prefix and start behind it. Prompts are
    numbered within the step from `first_prompt` on. One token in `audit_every` is recorded whole; 0 for none.
    """
    n = len(rollouts.group)
    group_size = n // (int(rollouts.group[-1]) + 1)
    first = np.arange(0, n, group_size)
    prompt_len = rollouts.prompt_len[first]
    prompt_ids = [f"{step:06d}.{first_prompt + p:04d}" for p in range(len(first))]
    rollouts.trajectory = [f"{prompt_ids[g]}.{i % group_size:02d}" for i, g in enumerate(rollouts.group)]
    own = rollouts.response_len - 1
    with GuidanceWriter(folder, schema, encoding=encoding) as writer:
        writer.append_batch(
            prompt_ids,
            token_ids=[rollouts.tokens[row, : rollouts.prompt_len[row]] for row in first],
            tok0=np.zeros(len(first), np.int64),
            lengths=prompt_len,
            sites=_rows(capture, schema, "prompt", whole=audit_every > 0),
            policy_version=rollouts.version,
            audit=audit_every,
        )
        writer.append_batch(
            rollouts.trajectory,
            token_ids=[
                rollouts.tokens[row, : rollouts.prompt_len[row] + rollouts.response_len[row]] for row in range(n)
            ],
            tok0=rollouts.prompt_len,
            lengths=own,
            sites=_rows(capture, schema, "response", whole=audit_every > 0),
            policy_version=rollouts.version,
            audit=audit_every,
            prefixes=[(prompt_ids[g], int(rollouts.prompt_len[i])) for i, g in enumerate(rollouts.group)],
        )


def _rows(capture: Capture, schema: GuidanceSchema, part: str, *, whole: bool) -> dict:
    """What `append_batch` takes of each site: low bits, or `whole` codes where some tokens are audited."""
    out = {}
    for spec in schema.sites:
        codes, scales, token_scale = getattr(capture.captured[spec.name], part)
        if not whole:
            codes = numerics.low_bits(codes, spec.bits) if spec.bits else None
        out[spec.name] = tuple(None if t is None else t.cpu().numpy() for t in (codes, scales, token_scale))
    return out
