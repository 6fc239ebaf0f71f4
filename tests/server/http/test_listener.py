"""Accepting connections: within bounds, pausing at them, and when the system has none left."""

import asyncio
import contextlib
import errno
import logging
import socket

import pytest
import uvicorn
from tests.server.http.test_connection import PATIENCE_S, REQUEST, App, run
from uvicorn.server import ServerState

from quire.errors import ConfigurationError
from quire.server.http import listener, open_connections
from quire.server.http.connection import ConnectionLimits, connection_class
from quire.server.http.listener import Listener, bound_socket
from quire.server.http.open_connections import OpenConnections


class Socket:
    """A listening socket whose `accept` fails with errors first."""

    def __init__(self, sock, numbers):
        self._sock = sock
        self._numbers = list(numbers)
        self.num_tries = 0

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def accept(self):
        self.num_tries += 1
        if self._numbers:
            raise OSError(self._numbers.pop(0), "no more")
        return self._sock.accept()


@contextlib.asynccontextmanager
async def listening(book, app=None, *, numbers=()):
    """The port of a listener, and its socket."""
    http = connection_class(ConnectionLimits(), book)
    config = uvicorn.Config(app or App(), http=http, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    with bound_socket("127.0.0.1", 0) as bound:
        sock = Socket(bound, numbers)

        def connect():
            return http(config=config, server_state=state, app_state={})

        started = Listener(sock, connect, book)
        try:
            yield sock.getsockname()[1], sock
        finally:
            started.close()
            await started.wait_closed()
            for task in state.tasks:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)


async def ask(port):
    """The status of an answer on a new connection, which is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_connections_beyond_the_bound_wait_and_are_answered(caplog):
    async def play():
        book = OpenConnections(max_open=3)
        async with listening(book) as (port, _):
            answers = await asyncio.gather(*(ask(port) for _ in range(40)))
            assert answers == [200] * 40
            await until(lambda: book.num_open == 0)
        assert book.num_closed_idle == book.num_refused == 0

    with caplog.at_level(logging.WARNING):
        run(play())
    assert len([record for record in caplog.records if "the maximum; idle" in record.message]) == 1


def test_idle_connections_give_their_places_to_new_ones(monkeypatch):
    monkeypatch.setattr(open_connections, "LEAST_WAIT_S", 0.02)
    monkeypatch.setattr(listener, "PAUSE_S", 0.01)

    async def play():
        book = OpenConnections(max_open=4)
        app = App()
        async with listening(book, app) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na")
            await reader.readuntil(b"fine")
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            assert await ask(port) == 200
            assert book.num_open <= 4 and book.num_closed_idle >= 5
            assert await idle[0][0].read() == b""
            for _, each in [(reader, writer), *idle]:
                each.transport.abort()

    run(play())


def test_a_connection_is_idle_again_after_its_answer(monkeypatch):
    monkeypatch.setattr(open_connections, "LEAST_WAIT_S", 0.0)

    async def play():
        book = OpenConnections()
        async with listening(book) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: book.num_open == 1)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd" + REQUEST)
            await reader.readuntil(b"fine")
            await reader.readuntil(b"fine")
            assert book.make_room()
            assert await reader.read() == b""
            writer.close()

    run(play())


def test_no_descriptor_means_a_pause_and_one_line(caplog, monkeypatch):
    monkeypatch.setattr(listener, "FAILURE_PAUSE_S", 0.01)

    async def play():
        numbers = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPROTO] * 3
        async with listening(OpenConnections(), numbers=numbers) as (port, sock):
            assert await ask(port) == 200
            assert len(numbers) < sock.num_tries < 3 * len(numbers)

    with caplog.at_level(logging.WARNING):
        run(play())
    lines = [record.message for record in caplog.records]
    assert lines == ["can't accept a connection beside 0 others: no more"]


def test_an_address_with_too_many_is_told_so(monkeypatch, caplog):
    monkeypatch.setattr(open_connections, "_group", lambda address: (address, True))
    caplog.set_level(logging.WARNING)

    async def play():
        book = OpenConnections(max_per_address=1)
        async with listening(book) as (port, _):
            _, first = await asyncio.open_connection("127.0.0.1", port)
            reader, second = await asyncio.open_connection("127.0.0.1", port)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in head
            assert b"too many connections are open from this address" in body
            assert (book.num_open, book.num_refused) == (1, 1)
            assert caplog.messages == ["beside 1 connections no more of 127.0.0.1 are accepted"]
            for each in (first, second):
                each.transport.abort()

    run(play())


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is in use"),
            bound_socket("127.0.0.1", port),
        ):
            pass
