"""The `tracekit` command: one module a sub-command, imported when it is asked for."""

from __future__ import annotations

from tracekit.cli.main import main

__all__ = ["main"]
