"""Entry point: picks the sub-command, and turns every exception into a short message and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import tracekit
from tracekit.errors import TracekitError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code.

    0 done, 1 an unexpected error, 2 configuration, 3 engine, 4 data, 130 interrupted. A traceback goes to the run's
    log file, or to a temporary one where there is no run yet, never to the terminal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    context = Context()
    try:
        return _dispatch(words, context)
    except SystemExit as stop:  # argparse: --help, --version, usage errors
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("tracekit: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`tracekit ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TracekitError as error:
        if context.log_file:
            context.write_traceback()
        lines = str(error).splitlines() or [type(error).__name__]
        print("\n".join(["tracekit: error: " + lines[0], *lines[1:3]]), file=sys.stderr)
        return error.exit_code
    except Exception as error:
        path = context.write_traceback()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"tracekit: error: {what[:200]} (traceback in {path})", file=sys.stderr)
        return 1


class Context:
    """What the error policy has to know of the command that runs. `log_file` is set once a run's folder exists."""

    def __init__(self) -> None:
        self.log_file: Path | None = None

    def write_traceback(self) -> Path:
        """Append the exception that is being handled to the log file; returns where it is."""
        text = traceback.format_exc()
        if self.log_file:
            try:
                with open(self.log_file, "a") as log:
                    log.write(text)
                return self.log_file
            except OSError:
                pass  # a full disk may be the very error that is being reported
        with tempfile.NamedTemporaryFile("w", prefix="tracekit-", suffix=".log", delete=False) as log:
            log.write(text)
        return Path(log.name)


def _dispatch(words: list[str], context: Context) -> int:
    if words[:1] == ["train"]:
        from tracekit.cli import train

        return train.run(words[1:], context)
    if words[:1] == ["serve"]:
        from tracekit.cli import serve

        return serve.run(words[1:])
    parser = argparse.ArgumentParser(prog="tracekit", description=tracekit.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tracekit {tracekit.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands.add_parser("train", help="train a model; without an argument, the quickstart", add_help=False)
    commands.add_parser("serve", help="start an SGLang server that records guidance", add_help=False)
    if words[:1] == ["guidance"]:
        from tracekit.cli import guidance

        guidance.register(commands)
    else:
        commands.add_parser("guidance", help="inspect and verify recorded guidance", add_help=False)
    arguments = parser.parse_args(words)
    handler: Callable[[argparse.Namespace], int] | None = getattr(arguments, "run", None)
    if handler is None:
        parser.print_help(sys.stderr if words else sys.stdout)
        return 2 if words else 0
    return handler(arguments)
