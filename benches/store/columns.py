"""Columnar files: Parquet, Lance."""

import numpy as np
from peer import ROWS, Peer


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
