"""Chunked array stores: HDF5, Zarr, TensorStore."""

import numpy as np
from peer import ROWS, Peer


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
