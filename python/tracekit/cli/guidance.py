"""`tracekit guidance`: look at, check and repair guidance on disk."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracekit.errors import DataError


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n >= 2**20 else f"{n / 1024:.1f} KiB"


def datasets(folder: str) -> list[str]:
    """`folder` if it holds segments itself, else the folders in it that do: a run's guidance has one a step."""
    if not any(Path(folder).glob("*.tkg*")) and Path(folder).is_dir():
        found = sorted(str(p) for p in Path(folder).iterdir() if p.is_dir() and any(p.glob("*.tkg*")))
        return found or [folder]
    return [folder]


def each(command: Callable[[str, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A handler that runs `command` on each dataset of `args.dir` and returns the worst exit code."""

    def run(args: argparse.Namespace) -> int:
        return max(command(folder, args) for folder in datasets(args.dir))

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


inspect, verify, recover = each(_inspect), each(_verify), each(_recover)


def register(subparsers: Any) -> None:
    """Adds `guidance` and its sub-commands."""
    parser = subparsers.add_parser("guidance", help="inspect, verify and recover guidance on disk")
    commands = parser.add_subparsers(dest="guidance_command", required=True)
    p = commands.add_parser("inspect", help="print what a folder of guidance holds")
    p.add_argument("dir")
    p.add_argument("--ids", type=int, default=5, help="trajectories to list (default 5)")
    p.set_defaults(run=inspect, max_ids=100_000)
    p = commands.add_parser("recover", help="rebuild the indexes that a killed writer did not write")
    p.add_argument("dir")
    p.set_defaults(run=recover)
    p = commands.add_parser("verify", help="check every byte of a folder of guidance; exit code 4 if any is damaged")
    p.add_argument("dir")
    p.set_defaults(run=verify)
