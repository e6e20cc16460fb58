"""Ways in which people keep such records, one class each: write, open, read a slice, read whole trajectories.

`codes` u8 `[N, sites, T, C]` and `scales` u8 `[N, sites, T, S]` are packed rows. `slice` returns the codes and scales
of tokens [a, b) of one site of one trajectory, `batch` those of whole trajectories, as arrays that own their bytes.
"""

import os
from pathlib import Path

import numpy as np

ROWS = 256


class Peer:
    name = ""
    checks = False
    """Whether a flipped bit is noticed."""
    few = False
    """Slow: measured on a quarter of the trajectories."""


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


class H5(Peer):
    def __init__(self, checks):
        self.checks = checks
        self.name = "h5py, chunks of 256 tokens" + (", fletcher32" if checks else "")

    def write(self, dir, codes, scales):
        import h5py

        with h5py.File(dir / "data.h5", "w") as f:
            for name, x in (("codes", codes), ("scales", scales)):
                chunks = (1, 1, ROWS, x.shape[3])
                d = f.create_dataset(name, x.shape, np.uint8, chunks=chunks, fletcher32=self.checks)
                for t in range(len(x)):
                    d[t] = x[t]

    def open(self, dir, codes, scales):
        import h5py

        self.f = h5py.File(dir / "data.h5", "r")
        return self

    def slice(self, t, site, a, b):
        return self.f["codes"][t, site, a:b], self.f["scales"][t, site, a:b]

    def batch(self, trajectories):
        return [(self.f["codes"][t], self.f["scales"][t]) for t in trajectories]


class Zarr(Peer):
    name, few = "Zarr v3, zstd 1, chunks of 256 tokens", True

    def write(self, dir, codes, scales):
        import zarr

        root = zarr.open_group(str(dir / "z"), mode="w")
        for name, x in (("codes", codes), ("scales", scales)):
            compress = None if name == "codes" else zarr.codecs.ZstdCodec(level=1)
            a = root.create_array(
                name, shape=x.shape, dtype="u1", chunks=(1, 1, ROWS, x.shape[3]), compressors=compress
            )
            for t in range(len(x)):
                a[t] = x[t]

    def open(self, dir, codes, scales):
        import zarr

        root = zarr.open_group(str(dir / "z"), mode="r")
        self.c, self.s = root["codes"], root["scales"]
        return self

    def slice(self, t, site, a, b):
        return self.c[t, site, a:b], self.s[t, site, a:b]

    def batch(self, trajectories):
        return [(self.c[t], self.s[t]) for t in trajectories]


class TensorStore(Peer):
    name, checks = "tensorstore zarr3, sharded, CRC32C", True

    def _open(self, dir, name, shape=None):
        import tensorstore as ts

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{dir}/{name}"}}
        if shape is None:
            return ts.open(spec, context=self._context(ts)).result()
        _, sites, rows, c = shape
        inner = {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": [1, 1, ROWS, c], "codecs": [{"name": "bytes"}, {"name": "crc32c"}]},
        }
        grid = {"name": "regular", "configuration": {"chunk_shape": [1, sites, rows, c]}}
        spec["metadata"] = {"shape": list(shape), "chunk_grid": grid, "data_type": "uint8", "codecs": [inner]}
        return ts.open(spec, create=True, context=self._context(ts)).result()

    def _context(self, ts):
        return ts.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}})

    def write(self, dir, codes, scales):
        for name, x in (("codes", codes), ("scales", scales)):
            array = self._open(dir, name, x.shape)
            for t in range(len(x)):
                array[t].write(x[t]).result()

    def open(self, dir, codes, scales):
        self.c, self.s = self._open(dir, "codes"), self._open(dir, "scales")
        return self

    def slice(self, t, site, a, b):
        c, s = self.c[t, site, a:b].read(), self.s[t, site, a:b].read()
        return c.result(), s.result()

    def batch(self, trajectories):
        return [(self.c[t].read().result(), self.s[t].read().result()) for t in trajectories]


class Parquet(Peer):
    name = "Parquet, one row group a trajectory, zstd 1 scales"

    def write(self, dir, codes, scales):
        import pyarrow as pa
        import pyarrow.parquet as pq

        n, sites, rows, c = codes.shape
        s = scales.shape[3]
        schema = pa.schema([("codes", pa.binary(c)), ("scales", pa.binary(s))])
        how = {"codes": "NONE", "scales": "ZSTD"}
        options = {"compression": how, "compression_level": {"scales": 1}, "use_dictionary": False}
        with pq.ParquetWriter(dir / "d.parquet", schema, **options, write_statistics=False) as w:
            for t in range(n):
                columns = [
                    pa.Array.from_buffers(pa.binary(k), sites * rows, [None, pa.py_buffer(x[t])])
                    for k, x in ((c, codes), (s, scales))
                ]
                w.write_table(pa.table(columns, schema=schema), row_group_size=sites * rows)

    def open(self, dir, codes, scales):
        import pyarrow.parquet as pq

        self.f, self.rows = pq.ParquetFile(dir / "d.parquet"), codes.shape[2]
        return self

    def _group(self, t):
        table = self.f.read_row_group(t, use_threads=False)
        return [np.frombuffer(table[i].chunk(0).buffers()[1], np.uint8).reshape(len(table), -1) for i in (0, 1)]

    def slice(self, t, site, a, b):
        return tuple(x[site * self.rows + a : site * self.rows + b].copy() for x in self._group(t))

    def batch(self, trajectories):
        return [tuple(self._group(t)) for t in trajectories]


class Lance(Peer):
    name, few = "Lance, 256 tokens a row", True

    def write(self, dir, codes, scales):
        import lance
        import pyarrow as pa

        c, s = ROWS * codes.shape[3], ROWS * scales.shape[3]
        schema = pa.schema([("codes", pa.binary(c)), ("scales", pa.binary(s))])

        def batches():
            for t in range(len(codes)):
                n = codes[t].nbytes // c
                columns = [
                    pa.Array.from_buffers(pa.binary(k), n, [None, pa.py_buffer(x[t])])
                    for k, x in ((c, codes), (s, scales))
                ]
                yield pa.record_batch(columns, schema=schema)

        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), str(dir / "d.lance"))

    def open(self, dir, codes, scales):
        import lance

        self.d = lance.dataset(str(dir / "d.lance"))
        self.sites, self.rows, self.c = codes.shape[1:]
        self.s = scales.shape[3]
        return self

    def _take(self, first, n):
        table = self.d.take(list(range(first, first + n)))
        parts = []
        for name, width in (("codes", self.c), ("scales", self.s)):
            column = table[name].combine_chunks()
            start = column.offset * ROWS * width
            flat = np.frombuffer(column.buffers()[1], np.uint8)[start : start + n * ROWS * width]
            parts.append(flat.reshape(-1, width).copy())
        return tuple(parts)

    def slice(self, t, site, a, b):
        return self._take((t * self.sites + site) * self.rows // ROWS + a // ROWS, (b - a) // ROWS)

    def batch(self, trajectories):
        n = self.sites * self.rows // ROWS
        return [self._take(t * n, n) for t in trajectories]


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
