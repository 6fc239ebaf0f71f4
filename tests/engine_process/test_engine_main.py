"""The engine's process as its parent sees it, with a fake engine."""

import contextlib
import os
import signal
import socket
import subprocess

from tests.engine_client import fake_engine_process as fake
from tests.engine_process.api_server import WAIT_S, ApiServer, request, tokens_of

from quire.engine_client.messages import AddRequest, Ready, Start


@contextlib.contextmanager
def spawned(options=None):
    """A real process of the fake engine, as (process, server)."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [*fake.COMMAND, "--fd", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        try:
            server = ApiServer(ours)
            server.send(Start(options or {}))
            yield process, server
        finally:
            process.kill()
            process.wait(WAIT_S)


def test_sigint_is_ignored_and_sigterm_drains():
    with spawned({"step_s": 0.02}) as (process, server):
        assert isinstance(server.receive(), Ready)
        server.send(AddRequest(request("a", max_tokens=20)))
        received = [server.receive()]
        process.send_signal(signal.SIGINT)
        received.append(server.receive())
        process.send_signal(signal.SIGTERM)
        received += server.receive_all()
        assert process.wait(WAIT_S) == 0
    assert tokens_of(received, "a") == list(range(11, 31))


def test_sigterm_wakes_an_idle_process():
    with spawned() as (process, server):
        assert isinstance(server.receive(), Ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_process_that_loads_a_model_ends_with_its_parents_socket():
    with spawned({"hang_s": 600}) as (process, server):
        server.sock.close()
        assert process.wait(WAIT_S) == 1


def test_a_process_in_the_middle_of_a_step_ends_with_its_parents_socket(tmp_path):
    mark = tmp_path / "hangs"
    with spawned({"hang_at_step": 1, "hang_mark": str(mark)}) as (process, server):
        assert isinstance(server.receive(), Ready)
        server.send(AddRequest(request("a")))
        while not mark.exists():
            assert process.poll() is None
        server.sock.close()
        assert process.wait(WAIT_S) == 1


def test_a_process_that_is_sending_ends_with_its_parents_socket():
    with spawned() as (process, server):
        assert isinstance(server.receive(), Ready)
        server.send(AddRequest(request("a", max_tokens=10**9, n=64)))
        server.receive()
        os.kill(process.pid, 0)
        server.sock.close()
        process.wait(WAIT_S)
