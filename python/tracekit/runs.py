"""A run's folder: its configuration, environment, metrics and checkpoints, and the rules for entering it again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tracekit
from tracekit.config import dump, fields
from tracekit.config.schema import Config
from tracekit.errors import ConfigError, DataError

COMPLETE = "COMPLETE"
"""Name of the marker that makes a checkpoint's folder a checkpoint."""

FREE_ON_RESUME = ("name", "out", "steps", "checkpoint.*", "log.*", "guidance.keep_steps", "guidance.byte_budget")
"""Keys that may differ when a run is resumed: none of them changes what a step computes."""

_FOLDERS = ("checkpoints", "guidance", "rollouts", "logs", "warmstart")
_REMOVED_BY_CLEAN = ("checkpoints", "guidance", "rollouts", "logs", "metrics.jsonl", "env.json", "report.html")
_RUN_FILES = ("resolved.json", "config.toml")  # last to go, so that a half-cleaned folder is still known as a run
_PACKAGES = ("tracekit-rl", "torch", "torchtitan", "numpy", "reasoning-gym", "msgpack", "zstandard", "triton")


class RunFolder:
    """`out/name`: config.toml, resolved.json, env.json, metrics.jsonl and one folder each for checkpoints, guidance,
    rollouts, logs and the cached warm start.

    Made by `create`. One process at a time holds a folder; the lock goes with the process.
    `resumed_from` is the checkpoint to continue from, `notes` what a person should hear about the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.guidance, self.rollouts, self.logs, self.warmstart = (path / name for name in _FOLDERS)
        self.metrics = path / "metrics.jsonl"
        self.log_file = self.logs / "train.log"
        self.audits = self.logs / "audits.json"
        self.resumed_from: Path | None = None
        self.notes: list[str] = []
        self._lock: Any = None

    @classmethod
    def create(
        cls,
        config: Config,
        *,
        resume: bool = False,
        clean: bool = False,
        sources: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
    ) -> RunFolder:
        """Make the run's folder, or enter it again.

        A folder that holds a run is refused unless `clean` removes that run (the warm start's cache stays) or
        `resume` continues it from its latest complete checkpoint, under a configuration that computes the same.
        Raises ConfigError for the refusals, DataError where there is nothing to resume from.
        """
        run = cls.check(config, resume=resume, clean=clean)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            if resume:
                run._enter(config)
            elif clean and run.holds_a_run():
                run._clean()
            write_atomic(run.path / "resolved.json", dump.to_json(config, sources))
            write_atomic(run.path / "config.toml", dump.to_toml(config, sources))
            write_atomic(run.path / "env.json", json.dumps(environment(argv), indent=2) + "\n")
            for name in _FOLDERS:
                (run.path / name).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write the run's folder {run.path}: {error.strerror or error}") from None
        return run

    @classmethod
    def check(cls, config: Config, *, resume: bool = False, clean: bool = False) -> RunFolder:
        """The refusals of `create` that need no lock, without changing anything on disk."""
        run = cls(Path(config.out) / config.name)
        if resume and clean:
            raise ConfigError("--resume continues a run and --clean removes it; give one of them")
        if resume and not run.holds_a_run():
            raise DataError(f"{run.path} holds no run to resume; start it without --resume")
        if not resume and not clean and run.holds_a_run():
            if run.latest_complete() is None:
                raise ConfigError(
                    f"{run.path} already holds a run, without a checkpoint to --resume; remove it with --clean "
                    "(a finished warm start is kept)"
                )
            raise ConfigError(f"{run.path} already holds a run; continue it with --resume, or remove it with --clean")
        if run.path.is_dir() and not run.holds_a_run() and (foreign := run._foreign()):
            raise ConfigError(f"{run.path} holds other files ({foreign}, ...) and no run; choose another name or out")
        return run

    def holds_a_run(self) -> bool:
        """Whether a run was started here."""
        return any((self.path / name).exists() for name in _RUN_FILES)

    def checkpoint_dir(self, step: int) -> Path:
        """Folder of the checkpoint after `step` steps."""
        return self.checkpoints / f"step_{step:06d}"

    def latest_complete(self) -> Path | None:
        """The newest checkpoint whose marker is there and whose files have the sizes it lists; damaged ones are
        passed over and named in `notes`."""
        for folder in sorted(self.checkpoints.glob("step_*"), reverse=True):
            if not (folder / COMPLETE).exists():
                continue
            if not (problem := check_complete(folder)):
                return folder
            self.notes.append(f"passed over a damaged checkpoint, {folder}: {problem}")
        return None

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep` complete checkpoints, and unfinished ones older than those."""
        complete = sorted(folder for folder in self.checkpoints.glob("step_*") if (folder / COMPLETE).exists())
        for folder in self.checkpoints.glob("step_*"):
            if len(complete) > keep and folder < complete[-keep]:
                with contextlib.suppress(FileNotFoundError):
                    (folder / COMPLETE).unlink()  # first, so that a half-removed checkpoint is not taken for one
                shutil.rmtree(folder, ignore_errors=True)

    def warmstart_dir(self, config: Config) -> Path:
        """Folder of the warm start that `config` would train: named by a hash of all that shapes it. It is usable
        when `check_complete` finds nothing wrong with it."""
        tables = dump.to_dict(config)
        shaping = [tables[key] for key in ("model", "task", "warmstart", "quant")]
        text = json.dumps(
            [shaping, config.seed, config.optim.beta2, config.optim.weight_decay], sort_keys=True, default=str
        )
        return self.warmstart / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _take_lock(self) -> None:
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held until the process ends)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"{self.path} is in use by another process; wait, or choose another name") from None
        except OSError as error:  # a file system without locks: a run there is no less valid
            self.notes.append(f"no lock on {self.path} ({error.strerror}): see that no other process uses it")

    def release(self) -> None:
        """Let another process (or another `create` in this one) enter the folder."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def _foreign(self) -> str | None:
        own = {"warmstart", ".lock", "resolved.json.tmp"}
        return next((entry.name for entry in sorted(self.path.iterdir()) if entry.name not in own), None)

    def _clean(self) -> None:
        for name in (*_REMOVED_BY_CLEAN, *_RUN_FILES):
            target = self.path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def _enter(self, config: Config) -> None:
        before = self._resolved()
        if changed := differing_keys(before, config):
            raise ConfigError(
                f"{self.path} was started with another {', '.join(changed)}; resume it with the same, "
                "or start over with --clean or another name"
            )
        self.resumed_from = self.latest_complete()
        if self.resumed_from is None:
            raise DataError(f"{self.path} has no complete checkpoint to resume from; start over with --clean")
        if before.get("steps") not in (None, config.steps):
            self.notes.append(
                f"steps = {config.steps} instead of {before['steps']}: the learning rate's schedule is now that of "
                f"{config.steps} steps"
            )
        self._set_aside_newer(self.resumed_from)
        self._trim_metrics(int(self.resumed_from.name.removeprefix("step_")))

    def _set_aside_newer(self, latest: Path) -> None:
        """Free the names that coming checkpoints will use: unfinished ones go, damaged ones are renamed."""
        for folder in self.checkpoints.glob("step_*"):
            if folder > latest and (folder / COMPLETE).exists():
                folder.rename(folder.with_name(f"damaged_{time.time_ns()}_{folder.name}"))
            elif folder > latest:
                shutil.rmtree(folder)

    def _resolved(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / "resolved.json").read_text())["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path / 'resolved.json'} cannot be read ({error}); start over with --clean"
            ) from None

    def _trim_metrics(self, step: int) -> None:
        """Move the lines of steps that will be run again, and a torn last line, to logs/discarded.jsonl."""
        if not self.metrics.exists():
            return
        kept, gone = [], []
        for line in self.metrics.read_text().splitlines():
            (kept if _line_step(line) <= step else gone).append(line)
        if gone:
            self.logs.mkdir(exist_ok=True)
            with open(self.logs / "discarded.jsonl", "a") as discarded:
                discarded.writelines(f"{line}\n" for line in gone)
            write_atomic(self.metrics, "".join(f"{line}\n" for line in kept))


def _line_step(line: str) -> float:
    try:
        return json.loads(line).get("step", 0)
    except (ValueError, AttributeError):
        return float("inf")


def write_complete(folder: Path) -> None:
    """Make `folder` a complete checkpoint: fsync every file in it, then write the marker with sizes and CRC-32s."""
    sizes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE):
        _fsync(path)
        sizes[path.relative_to(folder).as_posix()] = [path.stat().st_size, _checksum(path)]
    for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _fsync(inner)
    write_atomic(folder / COMPLETE, json.dumps({"files": sizes}, indent=1) + "\n")
    _fsync(folder.parent)


def check_complete(folder: Path) -> str | None:
    """What is wrong with a folder that `write_complete` finished, or None."""
    try:
        sizes = json.loads((folder / COMPLETE).read_text())["files"]
        for name, (size, checksum) in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _checksum(folder / name) != checksum:
                return f"{name} fails its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its marker cannot be read ({error})"
    return None


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def differing_keys(before: Mapping[str, Any], config: Config) -> list[str]:
    """Keys whose values in `before` (a resolved configuration) differ from `config`'s and change training.

    A key that `before` does not know, because an older version wrote it, counts with its default.
    """
    changed = []
    for key, leaf in fields.leaves(Config).items():
        if any(key == free or (free.endswith("*") and key.startswith(free[:-1])) for free in FREE_ON_RESUME):
            continue
        old: Any = before
        for part in key.split("."):
            old = old.get(part, leaf.default) if isinstance(old, Mapping) else leaf.default
            if old is leaf.default:
                break
        if old != fields.get(config, key):
            changed.append(key)
    return changed


def environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """`env.json`: versions, platform and threads; read from package metadata, nothing is imported."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": list(sys.argv if argv is None else argv),
        "tracekit": tracekit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": versions,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
    }


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
