"""`tracekit train` over two real servers of one run, one of which dies while it takes new weights."""

import http.client
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving import end, free_port, start_server, tracekit, wait_for

from tracekit.guidance import open_dataset, verify

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[2] / "configs"
UPDATE = "/update_weights_from_disk"


class Relay(ThreadingHTTPServer):
    """Passes requests on to a server at `target`; `asked(path)` runs between a request and its answer."""

    daemon_threads = True

    def __init__(self, target, asked):
        super().__init__(("127.0.0.1", 0), Passing)
        self.target, self.asked = target, asked
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A dead server's connection ends without an answer; so does the client's."""


class Passing(BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=300)
        server.request(self.command, self.path, body, {"Content-Type": "application/json"})
        self.server.asked(self.path)
        answer = server.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def training(out, urls, *flags):
    """`tracekit train` in a process; yields it and a function that returns what it wrote."""
    files = [str(CONFIGS / "quickstart.toml"), str(CONFIGS / "sglang_cpu.toml")]
    words = ["--out", str(out), "--name", "run", "--rollout.servers", json.dumps(urls), "--checkpoint.interval", "1"]
    words += ["--rollout.server-timeout", "300", "--guidance.keep-steps", "-1", *flags]
    path = out / f"train{len(list(out.glob('train*')))}.log"
    with open(path, "wb") as log:
        process = tracekit("train", *files, *words, log=log)
        try:
            yield process, path.read_text
        finally:
            end(process)


def wait_until(what, process, seconds=300):
    until = time.monotonic() + seconds
    while not what():
        assert process.poll() is None and time.monotonic() < until, process.poll()
        time.sleep(0.2)


def steps(out):
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "event" not in line]


def test_a_run_over_two_servers_survives_one(tmp_path):
    ports, servers, updates = [free_port(), free_port()], [], []

    def asked(path):
        """The third update is step 2's: the server dies in the middle of it."""
        updates.extend([path] if path == UPDATE else [])
        if path == UPDATE and len(updates) == 3:
            end(servers[1])

    relay = Relay(ports[1], asked)
    urls = [f"http://127.0.0.1:{ports[0]}", relay.url]
    model = tmp_path / "run" / "engine_model"
    with open(tmp_path / "servers.log", "wb") as log:
        try:
            with training(tmp_path, urls) as (trainer, said):
                wait_until((model / "tracekit.json").exists, trainer)
                servers += [start_server(model, port, log) for port in ports]
                wait_until(lambda: len(updates) == 3, trainer, seconds=500)
                died = time.monotonic()
                assert trainer.wait(60) == 3
                assert time.monotonic() - died < 30
                assert re.search(rf"{re.escape(relay.url)}{UPDATE}: the server failed", said())
                assert "--resume" in said()
            assert steps(tmp_path) == [1]

            servers[1] = start_server(model, ports[1], log)
            wait_for(servers[1], ports[1])
            with training(tmp_path, urls, "--resume") as (trainer, said):
                assert trainer.wait(300) == 0, said()
        finally:
            for server in servers:
                end(server)
            relay.shutdown()
            print((tmp_path / "servers.log").read_text()[-1000:])
    assert steps(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        folder = tmp_path / "run" / "guidance" / f"step_{step:06d}"
        assert len(list(folder.glob("*.tkg*"))) == 2  # a segment a server
        assert all(not report["damage"] for report in verify(folder))
        data = open_dataset(folder)
        ids = sorted(data.ids())
        assert ids == [f"{step:06d}.{p:04d}.{i:02d}" for p in range(8) for i in range(4)]
        assert {v for name in ids for v in data[name].policy_version} == {step - 1}
