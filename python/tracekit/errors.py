"""Errors that a person can act on. Each says what, where and what to do, in at most three lines."""


class TracekitError(Exception):
    """Base of the errors tracekit raises for a reason it understands. `exit_code` is the command's."""

    exit_code = 1


class ConfigError(TracekitError):
    """The configuration cannot be run as written."""

    exit_code = 2


class EngineError(TracekitError):
    """The rollout engine refused, died or does not match the learner."""

    exit_code = 3


class DataError(TracekitError):
    """Guidance, checkpoints or task data are missing, damaged or belong to something else."""

    exit_code = 4
