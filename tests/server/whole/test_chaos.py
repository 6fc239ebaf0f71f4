"""What goes wrong around a server: full disks, no memory, ports, signals, clients that are gone.

Crashes of the engine in the middle of answers are in `test_recovery`, ends and signals in
`test_launch`.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from tests.engine_client.fake_engine_process import COMMAND as FAKE
from tests.engine_client.fake_engine_process import RAISE
from tests.server.launching import PROGRAM, WAIT_S, launched

LOUD_PROGRAM = """
from quire.observability import log
log.configure("debug")
"""

BROKEN_ENGINE = """
import os, signal, sys
from quire.engine_process.engine_main import main

def build(*_, **__):
    {what}

sys.exit(main(build=build))
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_for(condition, what):
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
    return found


def has_status(url, status):
    try:
        return httpx.get(url, timeout=WAIT_S).status_code == status
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_for_logs_and_output_ends_nothing():
    port = free_port()
    spec = {"options": {}, "command": FAKE, "server": {"port": port}}
    url = f"http://127.0.0.1:{port}"
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", LOUD_PROGRAM + PROGRAM, json.dumps(spec)],
            stdout=full,
            stderr=full,
            start_new_session=True,
        )
    try:
        wait_for(lambda: has_status(f"{url}/health", 200), "the server never answered")
        broken = httpx.post(f"{url}/v1/completions", json={"prompt": [RAISE]}, timeout=WAIT_S)
        assert broken.status_code >= 500  # which brings many lines of log, in both processes
        wish = {"prompt": [10], "max_tokens": 3}
        wait_for(
            lambda: (
                httpx.post(f"{url}/v1/completions", json=wish, timeout=WAIT_S).status_code == 200
            ),
            "the server never recovered",
        )
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait(WAIT_S)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise MemoryError", "(?i)memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "(?i)SIGKILL.*memory"),
    ],
)
def test_an_engine_that_cannot_load_says_why_and_ends_the_server(what, reason):
    command = [sys.executable, "-c", BROKEN_ENGINE.format(what=what)]
    with launched(command=command, wait=False) as server:
        assert server.wait_for_exit() not in (0, None)
        lines = server.output().splitlines()
    errors = [line for line in lines if line.startswith("quire: error: ")]
    assert errors, lines
    assert any(re.search(reason, line) for line in errors), errors


def open_unread(server, **wish):
    """A connection whose client has sent a request and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [10], "stream": True, "max_tokens": 10**6} | wish).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def test_a_client_that_never_reads_does_not_hold_up_the_end():
    with launched(command=FAKE, fake={"step_s": 0.002}, drain_timeout_s=1) as server:
        with open_unread(server, n=16):
            server.wait_until(lambda stats: stats["num_steps"] > 300)  # buffers are full by then
            server.signal(signal.SIGTERM)
            assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_a_client_that_leaves_while_the_engine_is_away_leaves_nothing():
    with launched(command=FAKE, fake={"step_s": 0.01}) as server:
        before = server.engine.pid
        with open_unread(server):
            server.wait_until(lambda stats: stats["num_running"] == 1)
            os.kill(before, signal.SIGKILL)
        wait_for(lambda: has_status(f"{server.url}/ready", 200), "it never came back")
        assert server.wait_until(lambda stats: stats["num_running"] == 0)["aborted"] == []
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": [10], "max_tokens": 2}, timeout=WAIT_S
        )
        assert answer.status_code == 200
