"""Datasets in an S3-compatible store that the tests start, behind a proxy that misbehaves when told to."""

import http.client
import http.server
import os
import pickle
import threading

import numpy as np
import pytest

from tracekit.cli import main
from tracekit.errors import DataError
from tracekit.guidance import GuidanceWriter, commit_manifest, open_dataset, publish

moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on; `fault(request)` may answer instead, or change the answer's `(status, body)`."""

    protocol_version = "HTTP/1.1"

    def serve(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.log.append((self.command, self.path, self.headers.get("Range")))
        fault = server.fault and server.fault(self)
        if fault in ("403", "503"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", server.upstream)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        if fault == "flip":
            data = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(key, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        if fault == "cut":
            self.close_connection = True
            data = data[: len(data) // 2]
        self.end_headers()
        self.wfile.write(data)
        upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def servers():
    moto = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.upstream = moto.get_host_and_port()[1]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield proxy
    proxy.shutdown()
    moto.stop()


@pytest.fixture
def s3(servers, monkeypatch, request):
    """The proxy, with a fresh bucket `servers.bucket`."""
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{servers.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(key, value)
    servers.fault, servers.log = None, []
    servers.bucket = "b" + str(abs(hash(request.node.nodeid)))[:12]
    servers.client = boto3.client("s3")
    servers.client.create_bucket(Bucket=servers.bucket)
    servers.url = f"s3://{servers.bucket}/run/step1"
    return servers


def keys(s3):
    return sorted(o["Key"] for o in s3.client.list_objects_v2(Bucket=s3.bucket).get("Contents", []))


def is_read(request, name):
    return request.command == "GET" and name in request.path


def test_a_published_folder_reads_back_and_its_manifest_is_written_last(tmp_path, store, s3):
    data = store.dataset(tmp_path, [30, 600, 4], chunk_tokens=420)
    done = publish(tmp_path, s3.url)
    assert (done["number"], done["segments"], done["uploaded"], done["unsealed"]) == (1, 1, 1, 0)
    written = [path for method, path, _ in s3.log if method == "PUT" and "/run/" in path]
    assert "seg-" in written[0] and "manifest-000001" in written[-1] and len(written) == 2
    reader = open_dataset(s3.url)
    assert reader.manifest == 1 and reader.ids() == data.ids
    store.check(reader.read_batch(data.ids, token_ids=data.tokens), data.rows, slice(None))
    got = reader["t1"].read(slice(100, 500), sites=["layers.0.v"], heads=slice(1, 2))["layers.0.v"]
    np.testing.assert_array_equal(got.scales, data.rows["layers.0.v"][1][130:530, 1:2])
    again = pickle.loads(pickle.dumps(reader))
    assert again.ids() == data.ids
    with pytest.raises(DataError, match="are not those"):
        reader.read_batch(["t1"], token_ids=[data.tokens[1] + 1])
    assert publish(tmp_path, s3.url)["uploaded"] == 0 and len(keys(s3)) == 2


def test_readers_after_a_fork_make_their_own_connections(tmp_path, store, s3):
    data = store.dataset(tmp_path, [30])
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.check(reader.read_batch(["t0"]), data.rows, slice(None))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))


def test_near_ranges_are_one_request_and_far_ones_are_not_joined(tmp_path, store, s3):
    lengths = [200] * 20
    data = store.dataset(tmp_path, lengths, chunk_tokens=100)
    publish(tmp_path, s3.url)
    spans = {}
    for gap in (0, 1 << 20):
        reader = open_dataset(s3.url, gap=gap)
        s3.log.clear()
        ids = data.ids[::4]
        got = reader.read_batch(ids, sites=["layers.0.moe_input"])["layers.0.moe_input"]
        want = np.concatenate([data.rows["layers.0.moe_input"][1][200 * i : 200 * i + 200] for i in range(0, 20, 4)])
        np.testing.assert_array_equal(got.scales, want)
        reads = [r for _, _, r in s3.log if r]
        spans[gap] = len(reads)
    assert spans == {0: 10, 1 << 20: 1}, "a request a chunk, and one for all"


def test_a_rank_reads_its_sites_and_heads_and_little_more(tmp_path, s3):
    from tracekit.guidance import GuidanceSchema, SiteSpec

    sites = [SiteSpec(name=f"layers.{i}.k", width=128, planes=8, bits=4) for i in range(16)]
    rng = np.random.default_rng(0)
    rows = {
        s.name: (rng.integers(0, 16, (256, 8, 128), dtype=np.uint8), rng.integers(0, 120, (256, 8, 8), np.uint8), None)
        for s in sites
    }
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=sites), encoding="compact") as w:
        w.append_batch(["t"], [np.arange(257)], 0, [256], rows)
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url, gap=0)
    s3.log.clear()
    got = reader.read_batch(["t"], sites=["layers.3.k"], heads=slice(2, 4))["layers.3.k"]
    np.testing.assert_array_equal(got.codes, rows["layers.3.k"][0][:, 2:4])
    read = 0
    for _, _, r in s3.log:
        a, b = r.removeprefix("bytes=").split("-")
        read += int(b) - int(a) + 1
    (path,) = tmp_path.glob("*.tkg")
    share = 2 / 128 * path.stat().st_size
    assert read < 1.1 * share + 4096, (read, share)


def test_several_folders_under_one_url_and_what_others_published_stays(tmp_path, store, s3):
    a = store.dataset(tmp_path / "a", [5])
    schema = store.schema()
    rows = store.rows(np.random.default_rng(7), schema, 6)
    with GuidanceWriter(tmp_path / "b", schema) as w:
        w.append_batch(["other"], [np.arange(7)], 0, [6], rows)
    first = publish(tmp_path / "a", s3.url)
    old = open_dataset(s3.url)
    second = publish(tmp_path / "b", s3.url)
    assert (first["number"], second["number"], second["segments"]) == (1, 2, 2)
    reader = open_dataset(s3.url)
    store.check(reader.read_batch(["t0"]), a.rows, slice(None))
    store.check(reader.read_batch(["other"]), rows, slice(None))
    assert "other" not in old
    old.refresh()
    assert "other" in old


def test_two_publications_at_once_both_end_up_listed(tmp_path, store, s3):
    for name in ("a", "b"):
        schema = store.schema()
        with GuidanceWriter(tmp_path / name, schema) as w:
            w.append_batch([name], [np.arange(4)], 0, [3], store.rows(np.random.default_rng(0), schema, 3))
    inner = []

    def fault(request):
        if request.command == "PUT" and "manifest-000001" in request.path and not inner:
            inner.append(True)  # the other one takes the number first
            publish(tmp_path / "b", s3.url)

    s3.fault = fault
    done = publish(tmp_path / "a", s3.url)
    assert inner and done["number"] == 2 and done["uploaded"] == 1
    assert sorted(open_dataset(s3.url).ids()) == ["a", "b"]


def test_a_publication_that_fails_halfway_shows_nothing_and_can_be_repeated(tmp_path, store, s3):
    data = store.dataset(tmp_path, [5])
    s3.fault = lambda r: "503" if r.command == "PUT" and "manifest" in r.path else None
    with pytest.raises(DataError, match=r"cannot write s3://.*/manifest-000001: .*503"):
        publish(tmp_path, s3.url, retries=1)
    s3.fault = None
    with pytest.raises(DataError, match="has no manifest"):
        open_dataset(s3.url)
    publish(tmp_path, s3.url)
    store.check(open_dataset(s3.url).read_batch(["t0"]), data.rows, slice(None))


def test_503_is_retried_and_at_last_named(tmp_path, store, s3):
    data = store.dataset(tmp_path, [30])
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url, retries=2)
    left = [2]

    def twice(request):
        left[0] -= 1
        return "503" if left[0] >= 0 else None

    s3.fault = twice
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))
    assert left[0] < 0
    s3.fault = lambda r: "503"
    with pytest.raises(DataError, match=r"s3://.*/seg-.*\.tkg: .*503.*; try again"):
        reader.read_batch(["t0"])


def test_a_body_that_ends_early_is_asked_for_again_and_at_last_named(tmp_path, store, s3):
    data = store.dataset(tmp_path, [300])
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url, retries=1)
    left = [1]

    def once(request):
        left[0] -= 1
        return "cut" if left[0] >= 0 else None

    s3.fault = once
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))
    assert left[0] < 0
    s3.fault = lambda r: "cut"
    with pytest.raises(DataError, match=r"cannot read s3://.*/seg-.*\.tkg"):
        reader.read_batch(["t0"])


def test_wrong_bytes_are_named_and_never_returned(tmp_path, store, s3):
    data = store.dataset(tmp_path, [3000])
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url)
    s3.fault = lambda r: "flip" if is_read(r, "seg-") else None
    with pytest.raises(DataError, match=r"s3://.*/seg-.*is damaged at byte \d+.*; verify the folder") as e:
        reader.read_batch(["t0"])
    assert len(str(e.value).splitlines()) <= 3
    with pytest.raises(DataError, match=r"seg-.*damaged"):
        open_dataset(s3.url)
    s3.fault = None
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))


def test_missing_segments_and_manifests_are_named(tmp_path, store, s3):
    store.dataset(tmp_path, [30])
    with pytest.raises(DataError, match=r"s3://.*/run/step1 has no manifest .*publish a folder there"):
        open_dataset(s3.url)
    publish(tmp_path, s3.url)
    reader = open_dataset(s3.url)
    (segment,) = (k for k in keys(s3) if k.endswith(".tkg"))
    s3.client.delete_object(Bucket=s3.bucket, Key=segment)
    with pytest.raises(DataError, match=r"s3://.*/seg-.*is not there.*publish .*manifest-000001 lists it"):
        open_dataset(s3.url)
    with pytest.raises(DataError, match=r"s3://.*/seg-.*is not there"):
        reader.read_batch(["t0"])
    with pytest.raises(DataError, match="nobucket"):
        open_dataset("s3://nobucket-at-all/x", retries=0)


def test_a_damaged_newest_manifest_is_said_and_the_one_before_is_read(tmp_path, store, s3):
    data = store.dataset(tmp_path / "a", [5])
    publish(tmp_path / "a", s3.url)
    key = "run/step1/manifest-000001"
    good = s3.client.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
    bad = bytes([good[0]]) + bytes([good[1] ^ 1]) + good[2:]
    s3.client.put_object(Bucket=s3.bucket, Key="run/step1/manifest-000002", Body=bad)
    with pytest.warns(UserWarning, match=r"manifest-000002 is damaged"):
        reader = open_dataset(s3.url)
    store.check(reader.read_batch(["t0"]), data.rows, slice(None))
    s3.client.put_object(Bucket=s3.bucket, Key=key, Body=good[:-1])
    with pytest.raises(DataError, match=r"no manifest under s3://.* holds: s3://.*/manifest-00000[12] is damaged"):
        open_dataset(s3.url)


def test_a_large_segment_goes_up_in_parts(tmp_path, s3):
    from tracekit.guidance import GuidanceSchema, SiteSpec

    site = SiteSpec(name="x", width=4096, bits=4)
    rng = np.random.default_rng(0)
    n = 9000
    codes = rng.integers(0, 16, (n, 4096), dtype=np.uint8)
    with GuidanceWriter(tmp_path, GuidanceSchema(sites=[site]), encoding="lossless") as w:
        w.append_batch(["t"], [np.arange(n + 1)], 0, [n], {"x": (codes, np.full((n, 256), 99, np.uint8), None)})
    done = publish(tmp_path, s3.url)
    assert done["bytes"] > 17 << 20
    assert sum("partNumber" in path for _, path, _ in s3.log) >= 2
    got = open_dataset(s3.url)["t"].read(slice(8000, 8010))["x"]
    np.testing.assert_array_equal(got.unpack()[:, 0], codes[8000:8010])


def test_file_urls(tmp_path, store):
    data = store.dataset(tmp_path / "a", [30, 600])
    url = f"file://{tmp_path}/published"
    assert publish(tmp_path / "a", url)["number"] == 1
    store.check(open_dataset(url).read_batch(data.ids), data.rows, slice(None))
    assert commit_manifest(tmp_path / "published")["number"] == 1, "a folder's own manifest is of the same kind"
    with pytest.raises(ValueError, match="is no object store"):
        publish(tmp_path / "a", "ftp://x/y")
    with pytest.raises(DataError, match="holds no sealed segment"):
        (tmp_path / "empty").mkdir()
        publish(tmp_path / "empty", url)


def test_a_deleted_segment_is_published_again(tmp_path, store, s3):
    data = store.dataset(tmp_path, [30])
    publish(tmp_path, s3.url)
    (key,) = [k for k in keys(s3) if k.endswith(".tkg")]
    s3.client.delete_object(Bucket=s3.bucket, Key=key)
    with pytest.raises(DataError, match="publish the folder that it comes from again"):
        open_dataset(s3.url)
    done = publish(tmp_path, s3.url)
    assert (done["number"], done["segments"], done["uploaded"]) == (1, 1, 1)
    store.check(open_dataset(s3.url).read_batch(data.ids), data.rows, slice(None))
    assert publish(tmp_path, s3.url)["uploaded"] == 0


def test_what_is_wrong_with_bucket_credentials_or_endpoint_is_said(tmp_path, store, s3, monkeypatch, capsys):
    store.dataset(tmp_path, [3])
    with pytest.raises(DataError, match="404.*; check the bucket's name"):
        open_dataset("s3://no-such-bucket/run")
    with pytest.raises(DataError, match="404.*; check the bucket's name"):
        publish(tmp_path, "s3://no-such-bucket/run")
    s3.fault = lambda r: "403"
    for act in (lambda: open_dataset(s3.url), lambda: publish(tmp_path, s3.url)):
        with pytest.raises(DataError, match="the store refuses to list s3://.*403.*; check the credentials"):
            act()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "garbage")
    with pytest.raises(DataError, match="AWS_ENDPOINT_URL is 'garbage': use http://host:port"):
        open_dataset(s3.url)
    assert main(["guidance", "publish", str(tmp_path), "ftp://bucket/run"]) == 2
    assert "'ftp://bucket/run' is no object store: use s3://" in capsys.readouterr().err
