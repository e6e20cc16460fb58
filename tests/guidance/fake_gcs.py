"""Google Cloud Storage's XML API, as far as a store of segments and manifests uses it, over a dictionary."""

import hashlib
import http.server
import re
import threading
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class FakeGCS(http.server.ThreadingHTTPServer):
    """`objects` is `{(bucket, key): (bytes, generation)}`. `fault(request)` may answer a request instead with a status;
    `log` has every request as `(method, path, query, Range, generation to match)`."""

    daemon_threads = True

    def __init__(self, *buckets):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets, self.objects, self.uploads = set(buckets), {}, {}
        self.fault, self.log, self.generation, self.lock = None, [], 0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def keys(self):
        return sorted(key for _, key in self.objects)

    def put(self, where, data):
        self.generation += 1
        self.objects[where] = (data, self.generation)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def serve(self):
        server, parts = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        match = self.headers.get("x-goog-if-generation-match")
        self.key = key
        server.log.append((self.command, key, query, self.headers.get("Range"), match))
        if server.fault and (status := server.fault(self)):
            return self.answer(status, b"<Error><Code>InternalError</Code></Error>")
        if bucket not in server.buckets:
            return self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        with server.lock:
            if not key:
                return self.list(bucket, query)
            return getattr(self, self.command.lower())((bucket, key), query, body, match)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def list(self, bucket, query):
        """Two a page, so that paging is tried."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after = query.get("continuation-token", query.get("start-after", ""))
        names = sorted(k for b, k in self.server.objects if b == bucket and k.startswith(prefix) and k > after)
        names = [k for k in names if not (delimiter and delimiter in k[len(prefix) :])]
        page, more = names[:2], len(names) > 2
        items = ""
        for k in page:
            data, generation = self.server.objects[bucket, k]
            items += (
                f"<Contents><Key>{escape(k)}</Key><Size>{len(data)}</Size><Generation>{generation}</Generation>"
                f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{generation}"</ETag></Contents>'
            )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self.answer(200, f"<ListBucketResult>{items}{token}</ListBucketResult>".encode())

    def get(self, where, query, body, match):
        if where not in self.server.objects:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, generation = self.server.objects[where]
        headers = {"ETag": f'"{generation}"', "Last_Modified": formatdate(0, usegmt=True)}
        headers["x_goog_generation"] = generation
        if self.command == "HEAD":
            return self.answer(200, Content_Length=len(data), **headers)
        if not (asked := self.headers.get("Range")):
            return self.answer(200, data, **headers)
        first, last = (int(n) for n in re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
        last = min(last, len(data) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.answer(206, data[first : last + 1], **headers)

    head = get

    def put(self, where, query, body, match):
        if upload := query.get("uploadId"):
            self.server.uploads[upload][int(query["partNumber"])] = body
            return self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"', x_goog_generation=0)
        if match == "0" and where in self.server.objects:
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.server.put(where, body)
        return self.answer(200, ETag=f'"{self.server.generation}"', x_goog_generation=self.server.generation)

    def post(self, where, query, body, match):
        if "uploads" in query:
            upload = f"upload-{len(self.server.uploads)}"
            self.server.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self.answer(200, text.encode())
        parts = self.server.uploads.pop(query["uploadId"])
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        self.server.put(where, b"".join(parts[n] for n in numbers))
        text = f'<CompleteMultipartUploadResult><ETag>"{self.server.generation}"</ETag></CompleteMultipartUploadResult>'
        return self.answer(200, text.encode(), x_goog_generation=self.server.generation)

    def delete(self, where, query, body, match):
        self.server.uploads.pop(query.get("uploadId"), None)
        return self.answer(204)
