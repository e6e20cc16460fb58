"""Servers of the tests: started by `tracekit serve`, ended whole."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def tracekit(*words, log):
    """A process of `tracekit` with the command line's `words`."""
    code = "import sys; from tracekit.cli import main; sys.exit(main())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=log, stderr=log, env=environment)


def start_server(model, port, log, *flags):
    words = ["serve", str(model), "--port", str(port), "--max-total-tokens", "1024", "--max-running-requests", "8"]
    return tracekit(*words, *flags, log=log)


def wait_for(process, port, seconds=400):
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start, exit code {process.poll()}")


def family(process):
    """The server and the processes that it started."""
    try:
        return [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return []


def end(process):
    """Kill the server and the processes it started: SGLang's own do not all end with their parent at once."""
    members = family(process)
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(members, timeout=20)
