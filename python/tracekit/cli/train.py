"""`tracekit train`: configuration and flags into a run."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit import config as tk
from tracekit.config.load import split_words
from tracekit.errors import EngineError
from tracekit.runs import RunFolder

if TYPE_CHECKING:
    from tracekit.cli.main import Context

USAGE = """\
usage: tracekit train [CONFIG.toml ...] [--resume | --clean] [--dry-run] [--section.key VALUE ...]

Train as the configuration files say; later files and flags win. Without a file: the quickstart.

options:
  --dry-run    print the resolved configuration, the quantisation plan and the guidance's size; train nothing
  --resume     continue the run in its folder from its latest complete checkpoint
  --clean      remove the run that is in the folder first; its cached warm start stays
  -h, --help   this text
"""


def run(words: Sequence[str], context: Context) -> int:
    """Run `tracekit train` with the command line's `words`; returns the exit code."""
    paths, overrides, flags = split_words(words, ("--resume", "--clean", "--dry-run", "-h", "--help"))
    if {"-h", "--help"} & set(flags):
        from tracekit.config.reference import help_text

        print(f"{USAGE}\n{help_text(shutil.get_terminal_size((100, 24)).columns)}")
        return 0
    loaded = tk.load_with_sources(paths or [tk.quickstart()], overrides)
    tk.validate(loaded.config)
    if "--dry-run" in flags:
        notes = _check_objective(loaded)
        from tracekit.cli.dry_run import describe

        print("\n".join([describe(loaded), *([""] if notes else []), *notes]))
        return 0
    RunFolder.check(loaded.config, resume="--resume" in flags, clean="--clean" in flags)
    _check_engine(loaded.config)
    _check_task(loaded.config)
    notes = _check_objective(loaded)
    return _train(loaded, "--resume" in flags, "--clean" in flags, words, context, notes)


def _check_objective(loaded: tk.Loaded) -> list[str]:
    """Refuse knobs and combinations that the objective does not know, before a folder is made. Imports torch.

    Returns a line for the [algo] keys that were set and that the chosen method does not read.
    """
    from tracekit.objectives import from_config, unused_keys

    algo = loaded.config.algo
    from_config(algo, loaded.config.rollout)
    given = [key.removeprefix("algo.") for key in loaded.sources if key.startswith("algo.")]
    unread = unused_keys(algo, given)
    if not unread:
        return []
    where = ", ".join(f"algo.{key} ({loaded.sources[f'algo.{key}']})" for key in unread)
    return [f"not read by {algo.name} with correction {algo.correction}: {where}"]


def _check_engine(config: tk.Config) -> None:
    """Refuse an engine that is not installed, before anything is trained for it."""
    here = config.rollout.engine == "sglang" and not config.rollout.servers
    if here and importlib.util.find_spec("sglang") is None:
        raise EngineError('rollout.engine = "sglang": SGLang is not installed in this environment; see docs/sglang.md')


def _check_task(config: tk.Config) -> None:
    """Refuse a task that does not exist or does not fit, before a folder is made."""
    from tracekit.tasks import CharTokenizer, check_fits, load_task

    task = load_task(config.task, config.seed)
    check_fits(task, CharTokenizer.for_task(task), config)


def _train(
    loaded: tk.Loaded, resume: bool, clean: bool, words: Sequence[str], context: Context, notes: list[str]
) -> int:
    from tracekit.log import StepLog

    config = loaded.config
    run = RunFolder.create(
        config, resume=resume, clean=clean, sources=loaded.sources, argv=["tracekit", "train", *words]
    )
    context.log_file = run.log_file
    _divert_warnings(run.log_file)
    signal.signal(signal.SIGTERM, _interrupt)  # schedulers end jobs with it: leave as for Ctrl-C, with a checkpoint
    try:
        with StepLog(run.metrics, run.log_file, total_steps=config.steps) as log:
            for note in [*notes, *run.notes]:
                log.note(note)
            where = f", resumed from {run.resumed_from.name}" if run.resumed_from else ""
            log.note(f"run {run.path}{where}")
            from tracekit.learner.run import train

            return train(config, run, resume, log)
    except KeyboardInterrupt:
        latest = run.latest_complete()
        advice = (
            f"continue with --resume ({latest.name})"
            if latest
            else "no checkpoint was written yet: start over with --clean (a finished warm start is kept)"
        )
        print(f"tracekit: interrupted; {advice}", file=sys.stderr)
        return 130
    finally:
        run.release()


def _divert_warnings(path: Path) -> None:
    """Send Python warnings and the libraries' log records to the run's log file: the console is for the run."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers = [handler]
    for name in ("torch", "torchtitan"):  # these install handlers of their own
        logging.getLogger(name).handlers = [handler]


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
