"""`gs://` against a server of this process that speaks Google Cloud Storage's XML API."""

import json
import pickle

import numpy as np
import pytest
from fake_gcs import FakeGCS

from tracekit.errors import DataError
from tracekit.guidance import GuidanceSchema, GuidanceWriter, SiteSpec, open_dataset, publish

URL = "gs://bucket/run/step1"


@pytest.fixture
def gcs(monkeypatch):
    server = FakeGCS("bucket")
    account = {"gcs_base_url": server.url, "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def writes(gcs):
    return [(key, match) for method, key, query, _, match in gcs.log if method == "PUT" and not query]


def test_a_published_folder_reads_back_and_its_manifest_is_written_last(tmp_path, store, gcs):
    data = store.dataset(tmp_path, [30, 600, 4], chunk_tokens=420)
    done = publish(tmp_path, URL)
    assert (done["number"], done["segments"], done["uploaded"]) == (1, 1, 1)
    (segment, _), (manifest, match) = writes(gcs)
    assert segment.startswith("run/step1/seg-") and manifest == "run/step1/manifest-000001"
    assert match == "0", "only if there is no such manifest"
    reader = open_dataset(URL)
    assert reader.manifest == 1 and reader.ids() == data.ids
    store.check(reader.read_batch(data.ids, token_ids=data.tokens), data.rows, slice(None))
    assert pickle.loads(pickle.dumps(reader)).ids() == data.ids
    assert publish(tmp_path, URL)["uploaded"] == 0 and len(gcs.keys()) == 2


def test_ranges_are_read_and_near_ones_joined(tmp_path, store, gcs):
    data = store.dataset(tmp_path, [200] * 20, chunk_tokens=100)
    publish(tmp_path, URL)
    spans = {}
    for gap in (0, 1 << 20):
        reader = open_dataset(URL, gap=gap)
        gcs.log.clear()
        got = reader.read_batch(data.ids[::4], sites=["layers.0.moe_input"])["layers.0.moe_input"]
        want = np.concatenate([data.rows["layers.0.moe_input"][1][200 * i : 200 * i + 200] for i in range(0, 20, 4)])
        np.testing.assert_array_equal(got.scales, want)
        assert all(method == "GET" and asked for method, _, _, asked, _ in gcs.log)
        spans[gap] = len(gcs.log)
    assert spans == {0: 10, 1 << 20: 1}


@pytest.mark.parametrize("failing", ["seg-", "manifest-"])
def test_an_upload_that_fails_shows_nothing_and_can_be_repeated(tmp_path, store, gcs, failing):
    data = store.dataset(tmp_path, [5])
    gcs.fault = lambda r: 503 if r.command == "PUT" and failing in r.key else None
    with pytest.raises(DataError, match=rf"cannot write gs://bucket/run/step1/{failing}.*: .*503.*; try again"):
        publish(tmp_path, URL, retries=1)
    gcs.fault = None
    assert not any("manifest" in key for key in gcs.keys())
    with pytest.raises(DataError, match="has no manifest"):
        open_dataset(URL)
    publish(tmp_path, URL)
    store.check(open_dataset(URL).read_batch(["t0"]), data.rows, slice(None))


def test_two_publications_at_once_both_end_up_listed(tmp_path, store, gcs):
    schema = store.schema()
    for name in ("a", "b", "c"):
        with GuidanceWriter(tmp_path / name, schema) as w:
            w.append_batch([name], [np.arange(4)], 0, [3], store.rows(np.random.default_rng(0), schema, 3))
    inner = []

    def fault(request):
        if request.command == "PUT" and "manifest-000001" in request.key and not inner:
            inner.append(True)  # the other one takes the number first
            publish(tmp_path / "b", URL)

    gcs.fault = fault
    done = publish(tmp_path / "a", URL)
    assert inner and done["number"] == 2 and done["uploaded"] == 1
    assert publish(tmp_path / "c", URL)["number"] == 3, "the list of five objects takes three pages"
    assert sorted(open_dataset(URL).ids()) == ["a", "b", "c"]


def test_a_large_segment_goes_up_in_parts_and_a_failing_part_leaves_nothing(tmp_path, gcs):
    rng = np.random.default_rng(0)
    n = 9000
    codes = rng.integers(0, 16, (n, 4096), dtype=np.uint8)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=[SiteSpec(name="x", width=4096, bits=4)])) as w:
        w.append_batch(["t"], [np.arange(n + 1)], 0, [n], {"x": (codes, np.full((n, 256), 99, np.uint8), None)})
    gcs.fault = lambda r: 503 if "partNumber=2" in r.path else None
    with pytest.raises(DataError, match=r"cannot write gs://.*/seg-.*503"):
        publish(tmp_path, URL, retries=0)
    assert gcs.keys() == [] and gcs.uploads == {}, "the parts that came were given up"
    gcs.fault = None
    assert publish(tmp_path, URL)["bytes"] > 17 << 20
    assert sum("partNumber" in query for _, _, query, _, _ in gcs.log) >= 3
    got = open_dataset(URL)["t"].read(slice(8000, 8010))["x"]
    np.testing.assert_array_equal(got.unpack()[:, 0], codes[8000:8010])


def test_refusals_and_missing_objects_are_named(tmp_path, store, gcs):
    data = store.dataset(tmp_path, [30])
    publish(tmp_path, URL)
    reader = open_dataset(URL, retries=0)
    gcs.fault = lambda r: 403
    with pytest.raises(DataError, match=r"refuses to read gs://.*seg-.*GOOGLE_APPLICATION_CREDENTIALS"):
        reader.read_batch(["t0"])
    gcs.fault = None
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))
    where = next(w for w in gcs.objects if w[1].endswith(".tkg"))
    del gcs.objects[where]
    with pytest.raises(DataError, match=r"gs://bucket/run/step1/seg-.*is not there.*manifest-000001 lists it"):
        open_dataset(URL)
    with pytest.raises(DataError, match="gs://another"):
        open_dataset("gs://another/x", retries=0)
