"""The guidance store: what the sampler rounded to, on disk, addressed by trajectory, token and site."""

from typing import TYPE_CHECKING, Any

from tracekit.guidance.record import BatchRecord, SiteRecord
from tracekit.guidance.schema import GuidanceSchema, SiteSpec

if TYPE_CHECKING:
    from tracekit.guidance.budget import GuidanceBudget
    from tracekit.guidance.cuda_writer import DeviceWriter
    from tracekit.guidance.decode import decode
    from tracekit.guidance.prefetch import Microbatch, microbatches
    from tracekit.guidance.reader import GuidanceReader, Trajectory, open_dataset, recover, verify
    from tracekit.guidance.writer import GuidanceWriter, TrajectoryWriter

_WHERE = {
    "DeviceWriter": "cuda_writer",
    "GuidanceBudget": "budget",
    "Microbatch": "prefetch",
    "microbatches": "prefetch",
    "GuidanceReader": "reader",
    "GuidanceWriter": "writer",
    "Trajectory": "reader",
    "TrajectoryWriter": "writer",
    "decode": "decode",
    "open_dataset": "reader",
    "recover": "reader",
    "verify": "reader",
}

__all__ = [
    "BatchRecord",
    "DeviceWriter",
    "GuidanceBudget",
    "GuidanceReader",
    "GuidanceSchema",
    "GuidanceWriter",
    "Microbatch",
    "SiteRecord",
    "SiteSpec",
    "Trajectory",
    "TrajectoryWriter",
    "decode",
    "microbatches",
    "open_dataset",
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
