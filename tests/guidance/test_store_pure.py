"""The plain-Python reader reads every file the native writer writes, and agrees with the native reader."""

import shutil

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset
from tracekit.guidance.bits import pack_rows, unpack_rows
from tracekit.guidance.crc import crc32c
from tracekit.guidance.pure import PureReader


def slow_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_is_the_standard_one():
    assert crc32c(b"123456789") == 0xE3069283
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 3, 7, 8, 255, 256, 257, 5000):
        data = rng.integers(0, 256, n, dtype=np.uint8).tobytes()
        assert crc32c(data) == slow_crc(data), n


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing_is_its_own_inverse(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 2, 37), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_rows(pack_rows(codes, bits), bits, 37), codes)


def wide_schema(encoding):
    other = "compact" if encoding == "rm15" else encoding
    mx = {"profile": "mxfp4-rceil", "block": 32, "encoding": other}
    return GuidanceSchema(
        sites=[
            SiteSpec(name="x", width=1056, bits=1),
            SiteSpec(name="y", width=1024, planes=2, bits=2, **mx),
            SiteSpec(name="z", width=1000, bits=1, global_scale=None),
        ]
    )


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        for what in ("codes", "scales", "token_scale", "checks"):
            x, y = getattr(a[name], what), getattr(b[name], what)
            assert (x is None) == (y is None), (name, what)
            if x is not None:
                np.testing.assert_array_equal(x, y, err_msg=f"{name} {what}")
        assert a[name].tokens == b[name].tokens and a[name].global_scale == b[name].global_scale


@pytest.mark.parametrize("encoding", ["lossless", "compact", "low2", "rm15"])
def test_every_encoding_reads_the_same(tmp_path, store, encoding):
    data = store.dataset(tmp_path, [9, 300, 1], chunk_tokens=128, schema=wide_schema(encoding), encoding=encoding)
    native, pure = open_dataset(tmp_path), PureReader(tmp_path)
    assert pure.ids() == native.ids()
    assert {s.encoding for s in native.sites.values()} == {encoding} | ({"compact"} if encoding == "rm15" else set())
    for i, t in enumerate(data.ids):
        same(native[t].read(token_ids=data.tokens[i]), pure.read(t, token_ids=data.tokens[i]))
        same(native[t].read(slice(0, 1), ["z"]), pure.read(t, slice(0, 1), ["z"]))
    same(native["t1"].read(slice(100, 270)), pure.read("t1", slice(100, 270)))


@pytest.mark.parametrize("encoding", ["compact", "low2", "rm15"])
def test_what_an_encoding_keeps_is_what_it_says(tmp_path, store, encoding):
    data = store.dataset(tmp_path, [40], schema=wide_schema(encoding), encoding=encoding)
    got = open_dataset(tmp_path)["t0"].read()
    for name, bits in (("x", 3 if encoding == "compact" else 2), ("y", 1)):
        codes, scales, _ = data.rows[name]
        np.testing.assert_array_equal(got[name].scales, scales & ((1 << bits) - 1))
        want = [[crc32c(row) & 0xFFFF for row in token] for token in scales]
        np.testing.assert_array_equal(got[name].checks[..., 0], want)
        if got[name].site.encoding != "rm15":
            np.testing.assert_array_equal(got[name].unpack(), codes)
    if encoding == "rm15":
        codes = data.rows["x"][0]
        np.testing.assert_array_equal(got["x"].checks[:, 0, 1], [crc32c(pack_rows(c[0], 1)) & 0xFFFF for c in codes])
        difference = (got["x"].unpack() ^ codes).reshape(40, 33, 32)
        j = np.arange(32)
        constant = difference[..., :1]
        affine = constant.copy().repeat(32, -1)
        for i in range(5):
            affine ^= (difference[..., 1 << i : (1 << i) + 1] ^ constant) & (j >> i & 1).astype(np.uint8)
        np.testing.assert_array_equal(difference, affine)
        assert not got["x"].unpack().reshape(40, 33, 32)[..., [0, 1, 2, 4, 8, 16]].any()


def test_unsealed_files_and_prefixes(tmp_path, store):
    rng = np.random.default_rng(2)
    schema = store.schema()
    rows = store.rows(rng, schema, 17)
    tokens = [np.arange(12), np.arange(18)]
    w = GuidanceWriter(tmp_path / "a", schema, chunk_tokens=5)
    w.append_batch(["g", "s"], tokens, [0, 12], [12, 5], rows, 1, [None, ("g", 12)])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    pure = PureReader(tmp_path / "b")
    assert not pure.segments[0].sealed
    same(open_dataset(tmp_path / "b")["s"].read(slice(3, 16)), pure.read("s", slice(3, 16), token_ids=tokens[1]))
    with pytest.raises(DataError, match="not those its record was made for"):
        pure.read("s", token_ids=np.arange(18) + 1)
    w.close()
    same(open_dataset(tmp_path / "a")["s"].read(), PureReader(tmp_path / "a").read("s"))


def test_narrow_rows_stay_lossless(tmp_path, store):
    store.dataset(tmp_path, [5], encoding="compact")
    assert {s.encoding for s in open_dataset(tmp_path).sites.values()} == {"lossless"}
    spec = SiteSpec(name="k", width=64, planes=2, encoding="compact")
    store.dataset(tmp_path / "forced", [5], schema=GuidanceSchema(sites=[spec]))
    assert open_dataset(tmp_path / "forced").site("k").encoding == "compact"


@pytest.mark.parametrize("sealed", [True, False])
def test_a_missing_chunk_is_an_error_not_fewer_rows(tmp_path, store, sealed):
    store.dataset(tmp_path, [20, 0], chunk_tokens=8)
    (path,) = tmp_path.glob("*.tkg")
    raw = bytearray(path.read_bytes())
    first = 4096 + -(-int.from_bytes(raw[64:68], "little") // 8) * 8
    second = first + 64 + -(-int.from_bytes(raw[first + 8 : first + 16], "little") // 8) * 8
    index = int.from_bytes(raw[-56:-48], "little")
    path.unlink()
    raw[second + 70] ^= 1
    left = tmp_path / (path.name if sealed else path.name + ".open")
    left.write_bytes(raw if sealed else raw[:index])
    reader = PureReader(tmp_path)
    why = "payload checksum" if sealed else "'t0' has no valid chunk of site 'layers.0.moe_input' for token 8"
    for tokens in (None, slice(8, 16), slice(4, 9)):
        with pytest.raises(DataError, match=why):
            reader.read("t0", tokens)
    assert len(reader.read("t0", slice(0, 8))["layers.0.v"].scales) == 8
    same(reader.read("t1"), open_dataset(tmp_path)["t1"].read())


def test_ranges_that_a_record_does_not_have_are_refused_by_both(tmp_path, store):
    store.dataset(tmp_path, [20])
    for tokens in (slice(0, 21), slice(21, 21), slice(-5, None), slice(5, 2), slice(0, 4, 2)):
        for read in (open_dataset(tmp_path)["t0"].read, lambda tokens: PureReader(tmp_path).read("t0", tokens)):
            with pytest.raises((DataError, ValueError)):
                read(tokens)


def test_nonsense_under_good_checksums_is_an_error_of_ours(tmp_path):
    """A zstd frame that claims a terabyte, and one that is none."""
    schema = GuidanceSchema(sites=[SiteSpec(name="x", width=2048)])
    with GuidanceWriter(tmp_path, schema) as w:
        scales = np.full((64, 128), 77, np.uint8)
        w.append_batch(["t"], [np.arange(65)], 0, [64], {"x": (np.zeros((64, 2048), np.uint8), scales, None)})
    (path,) = tmp_path.glob("*.tkg")
    raw = bytearray(path.read_bytes())
    post, at = len(raw) - 64, 4096 + -(-int.from_bytes(raw[64:68], "little") // 8) * 8
    size, index = int.from_bytes(raw[at + 8 : at + 16], "little"), int.from_bytes(raw[post + 8 : post + 16], "little")
    assert raw[at + 5] == 2, "a whole chunk whose tail is a zstd frame"
    tail = at + 64 + 64 * 256
    for frame in (b"\x28\xb5\x2f\xfd\xc0\x00" + (1 << 40).to_bytes(8, "little"), b"no frame at all"):
        raw[tail : tail + len(frame)] = frame
        crc = crc32c(bytes(raw[at + 64 : at + 64 + -(-size // 8) * 8])).to_bytes(4, "little")
        raw[at + 32 : at + 36] = raw[index + 32 : index + 36] = crc
        raw[at + 60 : at + 64] = crc32c(bytes(raw[at : at + 60])).to_bytes(4, "little")
        raw[post + 48 : post + 52] = crc32c(bytes(raw[index:post])).to_bytes(4, "little")
        raw[post + 52 : post + 56] = bytes(4)
        raw[post + 52 : post + 56] = crc32c(bytes(raw[post:])).to_bytes(4, "little")
        path.write_bytes(raw)
        for read in (open_dataset(tmp_path)["t"].read, lambda: PureReader(tmp_path).read("t")):
            with pytest.raises(DataError, match="is damaged at byte"):
                read()
