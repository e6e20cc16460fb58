"""`tracekit guidance`: look at, check and repair guidance on disk."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracekit.errors import ConfigError, DataError
from tracekit.guidance.schema import ENCODINGS


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n >= 2**20 else f"{n / 1024:.1f} KiB"


def _holds_segments(folder: Path) -> bool:
    """Whether a writer wrote to this folder, or to its sub-folders `00` to `ff` with `fan_out`."""
    fan_out = "[0-9a-f]" * 2 + "/*.tkg*"
    return any(folder.glob("*.tkg*")) or any(folder.glob(fan_out))


def datasets(folder: str) -> list[str]:
    """`folder` if it holds segments itself or is a url, else its folders that do: a run has one a step."""
    if "://" in folder:
        return [folder]
    try:
        if not Path(folder).is_dir() or _holds_segments(Path(folder)):
            return [folder]
        found = sorted(str(p) for p in Path(folder).iterdir() if p.is_dir() and _holds_segments(p))
    except OSError:  # the command opens it, and says so better
        found = []
    return found or [folder]


def each(command: Callable[[str, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A handler that runs `command` on each dataset of `args.dir` and returns the worst exit code. One of several that
    cannot be read does not hide the others."""

    def run(args: argparse.Namespace) -> int:
        folders, worst = datasets(args.dir), 0
        for folder in folders:
            try:
                worst = max(worst, command(folder, args))
            except DataError as error:
                if len(folders) == 1:
                    raise
                print(f"tracekit: error: {error}", file=sys.stderr)
                worst = max(worst, error.exit_code)
        return worst

    return run


def _inspect(folder: str, args: argparse.Namespace) -> int:
    """Prints what a dataset holds."""
    from tracekit.guidance import open_dataset

    reader = open_dataset(folder)
    segments = reader.segments
    total = sum(s["bytes"] for s in segments)
    ids = reader.ids()
    tokens = int(reader.lengths(ids[: args.max_ids]).sum()) if ids else 0
    print(f"{folder}: {len(segments)} segments, {_mib(total)}, {len(ids)} trajectories")
    for s in segments:
        state = "sealed" if s["sealed"] else "open"
        major, minor = s["version"]
        print(
            f"  {s['path']}: {state}, format {major}.{minor}, {_mib(s['bytes'])}, {s['trajectories']} trajectories, "
            f"{s['chunks']} chunks"
        )
        for key, value in s["schema"].user.items():
            print(f"    {key} = {value}")
    print("  site                          planes  width  profile       block  bits  encoding  global scale")
    for site in reader.sites.values():
        scale = "per token" if site.global_scale is None else f"{site.global_scale:g}"
        print(
            f"  {site.name:<28}  {site.planes:>6}  {site.width:>5}  {site.profile:<12}  {site.block:>5}  "
            f"{site.bits:>4}  {site.encoding:<8}  {scale}"
        )
    for traj_id in ids[: args.ids]:
        t = reader[traj_id]
        prefix = f", prefix {t.prefix[0]}[:{t.prefix[1]}]" if t.prefix else ""
        print(f"  {traj_id}: tokens 0..{t.n_tokens}{prefix}, policy {t.policy_version[0]}, {t.status}")
    if ids and len(ids) <= args.max_ids:
        print(f"  {tokens} tokens with their prefixes")
    return 0


def _line(path: str, damage: tuple[int, int, str, bool]) -> str:
    offset, end, what, torn = damage
    note = " (unfinished tail: its writer died or is writing)" if torn else ""
    return f"{path}: bytes {offset}..{end}: {what}{note}"


def _verify(folder: str, _: argparse.Namespace) -> int:
    """Checks every byte; prints each damaged place and returns 4 if there is one."""
    from tracekit.guidance import verify as check

    reports: list[dict[str, Any]] = check(folder)
    if not reports:
        raise DataError(f"{folder} holds no guidance segments (*.tkg): give the folder that a writer wrote to")
    bad = 0
    for r in reports:
        for damage in r["damage"]:
            print(_line(r["path"], damage))
        bad += len(r["damage"])
    total, trajectories = sum(r["bytes"] for r in reports), sum(r["trajectories"] for r in reports)
    unsealed = sum(not r["sealed"] for r in reports)
    print(
        f"{folder}: {len(reports)} segments ({unsealed} not sealed), {_mib(total)}, {trajectories} committed "
        f"trajectories: {'no damage' if not bad else f'{bad} damaged places'}"
    )
    return DataError.exit_code if bad else 0


def _recover(folder: str, _: argparse.Namespace) -> int:
    """Rebuilds missing indexes; returns 4 if bytes other than an unfinished tail are damaged."""
    from tracekit.guidance import recover as rebuild

    reports = rebuild(folder)
    if not reports:
        raise DataError(f"{folder} holds no guidance segments (*.tkg): give the folder that a writer wrote to")
    for r in reports:
        if r["sidecar"]:
            torn = f", {r['torn_bytes']} bytes of an unfinished tail ignored" if r["torn_bytes"] else ""
            print(f"{r['path']}: {r['trajectories']} committed trajectories, index written to {r['sidecar']}{torn}")
        for damage in r["interior"]:
            print("interior corruption: " + _line(r["path"], damage))
    bad = sum(len(r["interior"]) for r in reports)
    total = sum(r["trajectories"] for r in reports)
    print(f"{folder}: {len(reports)} segments, {total} committed trajectories, {bad} damaged places before the tail")
    return DataError.exit_code if bad else 0


def _stats(folder: str, args: argparse.Namespace) -> int:
    """Prints what the audit records tell of each site."""
    from tracekit.guidance import audit, open_dataset
    from tracekit.guidance.stats import load_activations, record_stats

    reader = open_dataset(folder)
    alone = record_stats(reader)
    if not alone:
        raise DataError(f"{folder} has no audit records: write it with append(..., audit=True)")
    if args.activations is None:
        print(f"{folder}: audit records alone (entropies in bits; --activations adds flips, sigma and the encoding)")
        print("  site                          tokens   H(code)  H(low bit)  H(scale)  at +-6")
        for name, s in alone.items():
            print(
                f"  {name:<28}  {s['tokens']:>6}  {s['code_entropy']:>8.3f}  {s['low_bit_entropy']:>10.4f}  "
                f"{s['scale_entropy']:>8.2f}  {s['saturated']:>6.2%}"
            )
        return 0
    arrays = load_activations(args.activations)
    sites = audit(reader, lambda traj_id, site, _: arrays.get((traj_id, site)))
    if not sites:
        raise DataError(f"{args.activations} has no activations of {folder}: name its arrays 'trajectory|site'")
    _audit_table(folder, sites)
    return 0


def _audit_table(where: str, sites: dict[str, Any]) -> None:
    print(f"{where}: {len(sites)} sites audited; e: share of values an encoding gets wrong")
    print("  rule: the smallest encoding with e <= max(3.5 sigma^2, e of lossless), at most 1% of rows given up and")
    print("  more than 99% of flips adjacent")
    print(
        "  site                          flips    adjacent  scale flips  sigma     lossless  compact   low2      rm15"
    )
    for name, s in sites.items():
        errors = "  ".join(f"{s.error(e):<8.1e}" if e in s.errors else "-       " for e in ENCODINGS)
        print(
            f"  {name:<28}  {s.flip_rate:<7.3%}  {s.adjacency:<8.3%}  {s.scale_flip_rate:<11.3%}  {s.sigma:<8.2%}  "
            f"{errors} -> {s.affordable()}"
        )


def _publish(folder: str, args: argparse.Namespace) -> int:
    """Copies sealed segments to an object store, or writes the folder's next manifest."""
    from tracekit.guidance import commit_manifest, publish

    if args.url is None:
        m = commit_manifest(folder)
        print(f"{folder}: manifest {m['number']} lists {len(m['segments'])} segments")
        return 0
    try:
        done = publish(folder, args.url)
    except ValueError as e:  # no url
        raise ConfigError(str(e)) from e
    left = f"; {done['unsealed']} not sealed, left out" if done["unsealed"] else ""
    print(
        f"{args.url}: manifest {done['number']} lists {done['segments']} segments, {done['uploaded']} uploaded now "
        f"({_mib(done['bytes'])}){left}"
    )
    return 0


inspect, verify, recover = each(_inspect), each(_verify), each(_recover)


def stats(args: argparse.Namespace) -> int:
    """Of a run what its learner found; of a folder of guidance what its audit records tell."""
    run = Path(args.dir)
    if args.activations is None and os.path.isfile(run / "resolved.json"):
        from tracekit.guidance.stats import load_audits

        step, sites = load_audits(run / "logs" / "audits.json")
        _audit_table(f"{run}, up to step {step}", sites)
        return 0
    return each(_stats)(args)


def publish(args: argparse.Namespace) -> int:
    """One folder at a time: a url has one dataset."""
    return _publish(args.dir, args)


def register(subparsers: Any) -> None:
    """Adds `guidance` and its sub-commands."""
    parser = subparsers.add_parser("guidance", help="inspect, verify and recover guidance on disk")
    commands = parser.add_subparsers(dest="guidance_command", required=True)
    p = commands.add_parser("inspect", help="print what a folder of guidance holds")
    p.add_argument("dir")
    p.add_argument("--ids", type=int, default=5, help="trajectories to list (default 5)")
    p.set_defaults(run=inspect, max_ids=100_000)
    p = commands.add_parser("publish", help="copy sealed segments to s3://, gs:// or file://, the manifest last")
    p.add_argument("dir")
    p.add_argument("url", nargs="?", help="where to; without one, the folder's own next manifest is written")
    p.set_defaults(run=publish)
    p = commands.add_parser("stats", help="what audit records tell: flips, noise, and the encoding a model can afford")
    p.add_argument("dir", help="a run's folder, or one of guidance")
    p.add_argument("--activations", help="an .npz of the trainer's activations, arrays named 'trajectory|site'")
    p.set_defaults(run=stats)
    p = commands.add_parser("recover", help="rebuild the indexes that a killed writer did not write")
    p.add_argument("dir")
    p.set_defaults(run=recover)
    p = commands.add_parser("verify", help="check every byte of a folder of guidance; exit code 4 if any is damaged")
    p.add_argument("dir")
    p.set_defaults(run=verify)
