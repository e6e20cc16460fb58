"""Ways in which people keep such records, one class each: write, open, read a slice, read whole trajectories.

`codes` u8 `[N, sites, T, C]` and `scales` u8 `[N, sites, T, S]` are packed rows. `slice` returns the codes and scales
of tokens [a, b) of one site of one trajectory, `batch` those of whole trajectories, as arrays that own their bytes.
"""

import os
from pathlib import Path

import numpy as np
from arrays import H5, TensorStore, Zarr
from columns import Lance, Parquet
from peer import ROWS, Peer


class WriteLoop(Peer):
    """A plain write() of the same bytes with a CRC32C over them: what the ratios refer to."""

    name, checks = "write() + CRC32C", True

    def write(self, dir, codes, scales):
        from tracekit._core import crc32c

        self.sums = []
        with open(dir / "raw", "wb", buffering=0) as f:
            for c, s in zip(codes, scales, strict=True):
                for part in (c, s):
                    self.sums.append(crc32c(part.reshape(-1)))
                    f.write(part)

    def open(self, dir, codes, scales):
        self.shapes = codes.shape[1:], scales.shape[1:]
        self.f = os.open(dir / "raw", os.O_RDONLY)
        return self

    def slice(self, t, site, a, b):
        (n, rows, c), (_, _, s) = self.shapes
        base = t * n * rows * (c + s)
        codes = os.pread(self.f, (b - a) * c, base + (site * rows + a) * c)
        scales = os.pread(self.f, (b - a) * s, base + n * rows * c + (site * rows + a) * s)
        return np.frombuffer(codes, np.uint8).reshape(-1, c), np.frombuffer(scales, np.uint8).reshape(-1, s)

    def batch(self, trajectories):
        from tracekit._core import crc32c

        (n, rows, c), (_, _, s) = self.shapes
        out = []
        for t in trajectories:
            base = t * n * rows * (c + s)
            codes = np.frombuffer(os.pread(self.f, n * rows * c, base), np.uint8).reshape(n, rows, c)
            scales = np.frombuffer(os.pread(self.f, n * rows * s, base + n * rows * c), np.uint8).reshape(n, rows, s)
            assert [crc32c(codes.reshape(-1)), crc32c(scales.reshape(-1))] == self.sums[2 * t : 2 * t + 2]
            out.append((codes, scales))
        return out


class Tracekit(Peer):
    checks = True

    def __init__(self, encoding, mmap=False):
        self.encoding, self.mmap = encoding, mmap
        self.name = f"tracekit {encoding}" + ", mmap" * mmap

    def write(self, dir, codes, scales):
        from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec

        n, sites, rows, c = codes.shape
        names = [f"layers.{i}.moe_input" for i in range(sites)]
        specs = [SiteSpec(name=name, width=8 * c, block=8 * c // scales.shape[3]) for name in names]
        tokens = np.arange(rows + 1)
        with GuidanceWriter(dir, GuidanceSchema(sites=specs), encoding=self.encoding) as w:
            for t in range(n):
                data = {name: (codes[t, i], scales[t, i], None) for i, name in enumerate(names)}
                w.append_batch([f"t{t}"], [tokens], 0, [rows], data, packed=True)

    def open(self, dir, codes, scales):
        from tracekit.guidance import open_dataset

        self.reader = open_dataset(dir, mmap=self.mmap)
        self.names = [f"layers.{i}.moe_input" for i in range(codes.shape[1])]
        return self

    def slice(self, t, site, a, b):
        rec = self.reader.read_batch([f"t{t}"], [a], [b], [self.names[site]], unpack=False)[self.names[site]]
        return rec.codes[:, 0], rec.scales[:, 0]

    def batch(self, trajectories):
        got = self.reader.read_batch([f"t{t}" for t in trajectories], unpack=False)
        return [(r.codes, r.scales) for r in got.values()]


class Safetensors(Peer):
    name = "safetensors, one file a trajectory"

    def write(self, dir, codes, scales):
        from safetensors.numpy import save_file

        for t in range(len(codes)):
            save_file({"codes": codes[t], "scales": scales[t]}, dir / f"{t}.safetensors")

    def open(self, dir, codes, scales):
        self.dir = dir
        return self

    def slice(self, t, site, a, b):
        from safetensors import safe_open

        with safe_open(self.dir / f"{t}.safetensors", "np") as f:
            return f.get_slice("codes")[site, a:b], f.get_slice("scales")[site, a:b]

    def batch(self, trajectories):
        from safetensors.numpy import load_file

        files = (load_file(self.dir / f"{t}.safetensors") for t in trajectories)
        return [(f["codes"], f["scales"]) for f in files]


class ArrowIPC(Peer):
    name = "Arrow IPC file, mmap"

    def write(self, dir, codes, scales):
        import pyarrow as pa

        n, sites, rows, c = codes.shape
        s = scales.shape[3]
        fields = [pa.field("codes", pa.binary(c)), pa.field("scales", pa.binary(s))]
        schema = pa.schema(fields)
        with pa.OSFile(str(dir / "data.arrow"), "wb") as f, pa.ipc.new_file(f, schema) as w:
            for t in range(n):
                for i in range(sites):
                    columns = [
                        pa.Array.from_buffers(pa.binary(k), rows, [None, pa.py_buffer(x[t, i])])
                        for k, x in ((c, codes), (s, scales))
                    ]
                    w.write_batch(pa.record_batch(columns, schema=schema))

    def open(self, dir, codes, scales):
        import pyarrow as pa

        self.file = pa.ipc.open_file(pa.memory_map(str(dir / "data.arrow")))
        self.sites, self.rows = codes.shape[1:3]
        return self

    def _columns(self, number):
        batch = self.file.get_batch(number)
        return [np.frombuffer(col.buffers()[1], np.uint8).reshape(self.rows, -1) for col in batch.columns]

    def slice(self, t, site, a, b):
        return tuple(x[a:b].copy() for x in self._columns(t * self.sites + site))

    def batch(self, trajectories):
        return [
            tuple(x.copy() for x in self._columns(t * self.sites + i)) for t in trajectories for i in range(self.sites)
        ]


class LMDB(Peer):
    name = "LMDB, 256 tokens a value, no sync"

    def write(self, dir, codes, scales):
        import lmdb

        size = codes.nbytes + scales.nbytes
        env = lmdb.open(str(dir / "db"), map_size=size * 3 + (64 << 20), sync=False, writemap=True)
        for t in range(len(codes)):
            with env.begin(write=True) as txn:
                for i in range(codes.shape[1]):
                    for k in range(0, codes.shape[2], ROWS):
                        txn.put(b"%d/%d/%d/c" % (t, i, k), memoryview(codes[t, i, k : k + ROWS].reshape(-1)))
                        txn.put(b"%d/%d/%d/s" % (t, i, k), memoryview(scales[t, i, k : k + ROWS].reshape(-1)))
        env.close()

    def open(self, dir, codes, scales):
        import lmdb

        self.env = lmdb.open(str(dir / "db"), readonly=True, lock=False, map_size=1 << 33)
        self.shape, self.s = codes.shape[1:], scales.shape[3]
        return self

    def _read(self, txn, t, site, a, b):
        _, _, c = self.shape
        codes, scales = np.empty((b - a, c), np.uint8), np.empty((b - a, self.s), np.uint8)
        for k in range(a, b, ROWS):
            for x, kind in ((codes, b"c"), (scales, b"s")):
                value = np.frombuffer(txn.get(b"%d/%d/%d/%s" % (t, site, k, kind)), np.uint8)
                x[k - a : k - a + ROWS] = value.reshape(ROWS, -1)
        return codes, scales

    def slice(self, t, site, a, b):
        with self.env.begin(buffers=True) as txn:
            return self._read(txn, t, site, a, b)

    def batch(self, trajectories):
        sites, rows, _ = self.shape
        with self.env.begin(buffers=True) as txn:
            return [self._read(txn, t, i, 0, rows) for t in trajectories for i in range(sites)]


class MsgpackZstd(Peer):
    name, checks = "msgpack + zstd 1 with checksum, one file a trajectory", True

    def write(self, dir, codes, scales):
        import msgpack
        import zstandard

        z = zstandard.ZstdCompressor(level=1, write_checksum=True)
        for t in range(len(codes)):
            data = msgpack.packb({"codes": codes[t].tobytes(), "scales": scales[t].tobytes()})
            Path(dir / f"{t}").write_bytes(z.compress(data))

    def open(self, dir, codes, scales):
        self.dir, self.shapes = dir, (codes.shape[1:], scales.shape[1:])
        return self

    def _load(self, t):
        import msgpack
        import zstandard

        d = msgpack.unpackb(
            zstandard.ZstdDecompressor().decompress((self.dir / f"{t}").read_bytes()), max_bin_len=1 << 30
        )
        arrays = zip(("codes", "scales"), self.shapes, strict=True)
        return tuple(np.frombuffer(d[k], np.uint8).reshape(shape) for k, shape in arrays)

    def slice(self, t, site, a, b):
        return tuple(x[site, a:b].copy() for x in self._load(t))

    def batch(self, trajectories):
        return [self._load(t) for t in trajectories]


ALL = [
    WriteLoop(),
    *(Tracekit(e) for e in ("lossless", "compact", "low2", "rm15")),
    Tracekit("lossless", mmap=True),
    Tracekit("compact", mmap=True),
    Safetensors(),
    ArrowIPC(),
    LMDB(),
    H5(False),
    H5(True),
    Zarr(),
    TensorStore(),
    Parquet(),
    Lance(),
    MsgpackZstd(),
]
