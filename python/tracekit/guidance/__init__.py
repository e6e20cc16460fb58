"""The guidance store: what the sampler rounded to, on disk, addressed by trajectory, token and site."""

from typing import TYPE_CHECKING, Any

from tracekit.guidance.record import AuditRows, BatchRecord, SiteRecord
from tracekit.guidance.schema import GuidanceSchema, SiteSpec

if TYPE_CHECKING:
    from tracekit.guidance.budget import GuidanceBudget
    from tracekit.guidance.cuda_writer import DeviceWriter
    from tracekit.guidance.decode import decode
    from tracekit.guidance.prefetch import Microbatch, microbatches
    from tracekit.guidance.reader import GuidanceReader, Trajectory, open_dataset, recover, verify
    from tracekit.guidance.regime import Audit, SiteAudit, audit, audit_tokens
    from tracekit.guidance.remote import commit_manifest, latest_manifest, publish
    from tracekit.guidance.writer import GuidanceWriter, TrajectoryWriter

_WHERE = {
    "Audit": "regime",
    "DeviceWriter": "cuda_writer",
    "GuidanceBudget": "budget",
    "Microbatch": "prefetch",
    "microbatches": "prefetch",
    "GuidanceReader": "reader",
    "GuidanceWriter": "writer",
    "Trajectory": "reader",
    "SiteAudit": "regime",
    "TrajectoryWriter": "writer",
    "audit": "regime",
    "audit_tokens": "regime",
    "commit_manifest": "remote",
    "decode": "decode",
    "latest_manifest": "remote",
    "open_dataset": "reader",
    "publish": "remote",
    "recover": "reader",
    "verify": "reader",
}

__all__ = [
    "Audit",
    "AuditRows",
    "BatchRecord",
    "DeviceWriter",
    "GuidanceBudget",
    "GuidanceReader",
    "GuidanceSchema",
    "GuidanceWriter",
    "Microbatch",
    "SiteAudit",
    "SiteRecord",
    "SiteSpec",
    "Trajectory",
    "TrajectoryWriter",
    "audit",
    "audit_tokens",
    "commit_manifest",
    "decode",
    "latest_manifest",
    "microbatches",
    "open_dataset",
    "publish",
    "recover",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads what needs the native core on first use, so that the pure-Python reader works without it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'tracekit.guidance' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(f"tracekit.guidance.{_WHERE[name]}"), name)
    globals()[name] = value  # the function `decode` takes the place of its module
    return value
