"""Runs every peer on the same data and writes the table into docs/store-benchmark.md.

    python benches/store/run.py [--dir /dev/shm] [--trajectories 16] [--only NAME …] [--write]

Peers that are not installed are skipped and named. CPU time is the process's own, user and system, over all its
threads; wall time stands beside it. Each figure is the median of `--repeat` runs, interleaved over the peers, so that a
busy machine hits all alike, and each ratio that of the ratios within a run; latencies are medians and 99th percentiles
over all runs.
"""

import argparse
import gc
import platform
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from peers import ALL

WIDTH, BLOCK, SITES, TOKENS = 2048, 16, 20, 1024
MARK = "<!-- table: benches/store/run.py -->"


def make_data(n):
    """One-bit codes and E4M3 scales of heavy-tailed activations with channels of different size."""
    rng = np.random.default_rng(0)
    pool = 8192
    x = rng.standard_t(4, (pool, WIDTH)).astype(np.float32) * np.exp(0.5 * rng.normal(size=WIDTH)).astype(np.float32)
    amax = np.abs(x).reshape(pool, -1, BLOCK).max(-1)
    v = amax * (448 / amax.max())
    exponent = np.floor(np.log2(v))
    scales = np.clip(np.rint(8 * (exponent + 7) + 8 * (v / 2**exponent - 1)), 0, 126).astype(np.uint8)
    codes = rng.integers(0, 256, (n, SITES, TOKENS, WIDTH // 8), dtype=np.uint8)
    out = np.empty((n, SITES, TOKENS, WIDTH // BLOCK), np.uint8)
    for t in range(n):
        for i in range(SITES):
            out[t, i] = scales[rng.integers(0, pool, TOKENS)]  # rows drawn one by one: no long repeats for a compressor
    return codes, out


def timed(f):
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    out = f()
    return out, time.perf_counter() - wall, time.process_time() - cpu


def size_of(dir):
    return sum(p.stat().st_blocks * 512 for p in Path(dir).rglob("*") if p.is_file())


class Row:
    def __init__(self, peer):
        self.peer, self.write, self.read = peer, [], []
        self.latency, self.size = [], 0.0


def measure(row, root, codes, scales):
    peer = row.peer
    if peer.few:
        codes, scales = codes[: max(len(codes) // 4, 1)], scales[: max(len(scales) // 4, 1)]
    raw = codes.nbytes + scales.nbytes
    dir = Path(tempfile.mkdtemp(dir=root))
    try:
        _, wall, cpu = timed(lambda: peer.write(dir, codes, scales))
        row.write.append((raw / 1e6 / wall, raw / 1e6 / cpu))
        row.size = size_of(dir) / raw
        handle = peer.open(dir, codes, scales)
        rng = random.Random(1)
        for k in range(200):
            t, site, a = rng.randrange(len(codes)), rng.randrange(SITES), 256 * rng.randrange(3)
            start = time.perf_counter()
            c, s = handle.slice(t, site, a, a + 512)
            row.latency.append(time.perf_counter() - start)
            if k == 0 and not any(e in peer.name for e in ("compact", "low2", "rm15")):
                assert np.array_equal(c, codes[t, site, a : a + 512]) and np.array_equal(
                    s, scales[t, site, a : a + 512]
                )
        trajectories = list(range(len(codes)))
        got, wall, cpu = timed(lambda: handle.batch(trajectories))
        assert sum(c.size for c, _ in got) == codes.size
        row.read.append((raw / 1e6 / wall, raw / 1e6 / cpu))
    finally:
        shutil.rmtree(dir, ignore_errors=True)


def table(rows, missing, args):
    base = next((r for r in rows if r.peer.name.startswith("write()")), None)

    def middle(pairs, k):
        return np.median([p[k] for p in pairs])

    lines = [
        "| store | flipped bit | size | write CPU MB/s (wall) | of write()+CRC | slice µs, median (p99) "
        "| microbatch CPU MB/s (wall) |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratio = np.median([a[1] / b[1] for a, b in zip(r.write, base.write, strict=True)]) if base else float("nan")
        p50, p99 = np.percentile(r.latency, [50, 99]) * 1e6
        lines.append(
            f"| {r.peer.name} | {'error' if r.peer.checks else 'silent'} | {r.size:.3f} | {middle(r.write, 1):.0f} "
            f"({middle(r.write, 0):.0f}) | {ratio:.2f} | {p50:.0f} ({p99:.0f}) | {middle(r.read, 1):.0f} "
            f"({middle(r.read, 0):.0f}) |"
        )
    note = f"{args.trajectories} trajectories x {TOKENS} tokens x {SITES} sites x {WIDTH} values, "
    note += f"medians of {args.repeat} runs, "
    note += f"in {args.dir}, Python {platform.python_version()}, {platform.machine()}, load {args.load}."
    if missing:
        note += " Not installed: " + ", ".join(missing) + "."
    return "\n".join([note, "", *lines])


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--dir", default=tempfile.gettempdir())
    p.add_argument("--trajectories", type=int, default=16)
    p.add_argument("--repeat", type=int, default=9)
    p.add_argument("--only", nargs="*")
    p.add_argument("--write", action="store_true", help="put the table into docs/store-benchmark.md")
    args = p.parse_args()
    codes, scales = make_data(args.trajectories)
    rows = [Row(peer) for peer in ALL if not args.only or any(o in peer.name for o in args.only)]
    missing = []
    for k in range(args.repeat):
        for row in list(rows):
            try:
                measure(row, args.dir, codes, scales)
            except ImportError:
                rows.remove(row)
                missing.append(row.peer.name)
        print(f"repeat {k + 1} of {args.repeat} done", flush=True)
    args.load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else "unknown"
    text = table(rows, missing, args)
    print(text)
    if args.write:
        page = Path(__file__).parents[2] / "docs" / "store-benchmark.md"
        head, _, rest = page.read_text().partition(MARK)
        tail = rest.partition(MARK)[2]
        page.write_text(f"{head}{MARK}\n{text}\n{MARK}{tail}")


if __name__ == "__main__":
    main()
