"""The time limits of a connection, with uvicorn's protocol inside and real sockets."""

import asyncio
import contextlib
import socket
import time

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quire.errors import ConfigurationError
from quire.server import connection
from quire.server.connection import ConnectionLimits, connection_class

PATIENCE_S = 20.0
BIG = b"x" * (8 << 20)  # more than all buffers between two sockets take


class App:
    """Answers with `body`, once the request's own body has come; remembers what it saw."""

    def __init__(self, body=b"fine"):
        self.body = body
        self.ended = asyncio.Event()
        self.has_disconnected = False

    async def __call__(self, scope, receive, send):
        try:
            while (await receive()).get("more_body"):
                pass
            length = str(len(self.body)).encode()
            headers = [(b"content-length", length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for start in range(0, len(self.body), 1 << 16):
                piece = self.body[start : start + (1 << 16)]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self.has_disconnected = (await receive())["type"] == "http.disconnect"
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(app, **limits):
    """The port of a listener whose connections have these limits."""
    config = uvicorn.Config(
        app, http=connection_class(ConnectionLimits(**limits)), lifespan="off", log_config=None
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def protocol():
        return config.http_protocol_class(
            config=config, server_state=state, app_state={}, _loop=loop
        )

    server = await loop.create_server(protocol, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"])
def test_a_head_that_does_not_come_is_not_waited_for(sent):
    async def play():
        app = App()
        async with serving(app, head_timeout_s=0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert not app.ended.is_set()

    run(play())


def test_bytes_that_keep_coming_do_not_prolong_the_head():
    async def play():
        async with serving(App(), head_timeout_s=0.2) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            gone = asyncio.ensure_future(reader.read())
            start_s = time.monotonic()
            writer.write(REQUEST[:-4])
            while not gone.done() and time.monotonic() < start_s + PATIENCE_S / 2:
                writer.write(b"\r\nA: b")
                await asyncio.wait((gone,), timeout=0.02)
            assert gone.done()
            gone.exception()
            writer.close()

    run(play())


def test_an_answer_may_take_longer_than_a_head_and_so_may_a_body():
    async def play():
        app = App()
        async with serving(app, head_timeout_s=0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
            await asyncio.sleep(0.15)
            writer.write(b"cd")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(4) == b"fine"
            writer.close()

    run(play())


def test_the_next_request_of_a_connection_has_the_same_limit():
    async def play():
        async with serving(App(), head_timeout_s=0.1) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(REQUEST)
                await reader.readuntil(b"fine")
            writer.write(REQUEST[:9])
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    run(play())


def test_a_client_that_takes_nothing_of_its_answer_is_cut_and_the_application_told():
    async def play():
        app = App(BIG)
        async with serving(app, unread_timeout_s=0.2) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(REQUEST)
                await asyncio.wait_for(app.ended.wait(), PATIENCE_S)
                assert app.has_disconnected
                client.settimeout(PATIENCE_S)
                num_bytes = 0
                with contextlib.suppress(ConnectionResetError):
                    while data := client.recv(1 << 20):
                        num_bytes += len(data)
                assert num_bytes < len(BIG)

    run(play())


def test_a_client_that_takes_its_answer_slowly_is_left_alone():
    async def play():
        async with serving(App(BIG), unread_timeout_s=0.5) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            num_left, start_s = len(BIG), time.monotonic()
            while num_left:
                data = await reader.read(min(num_left, 1 << 17))
                assert data, f"cut with {num_left} bytes to go"
                num_left -= len(data)
                await asyncio.sleep(0.01)
            assert time.monotonic() - start_s > 0.6  # longer than it may take nothing
            writer.close()

    run(play())


@pytest.mark.parametrize("name", ["head_timeout_s", "unread_timeout_s"])
def test_a_limit_must_be_above_zero(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 0"):
        ConnectionLimits(**{name: 0})


@pytest.mark.parametrize("kind", [H11Protocol, pytest.param("httptools", id="httptools")])
def test_what_is_sent_ahead_of_answers_is_bounded(monkeypatch, kind):
    if kind == "httptools":
        pytest.importorskip("httptools")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as kind

    monkeypatch.setattr(connection, "AutoHTTPProtocol", kind)
    monkeypatch.setattr(connection, "MAX_AHEAD_BYTES", 1 << 20)

    async def send_until_cut(port, start, piece):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(1000):
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 1)
            raise AssertionError(f"all of it was taken, {piece[:20]!r}")
        writer.transport.abort()

    async def test():
        async with serving(App(BIG), head_timeout_s=PATIENCE_S) as port:
            await send_until_cut(port, b"GET /", b"a" * 65536)
            await send_until_cut(port, b"GET / HTTP/1.1\r\n", b"A: " + b"a" * 60000 + b"\r\n")
            await send_until_cut(port, b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)

    run(test())
