"""The time limits of a connection, with uvicorn's protocol inside and real sockets."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.errors import ConfigurationError
from quire.server.http import connection
from quire.server.http.connection import ConnectionLimits, connection_class
from quire.server.http.guard import RequestHead
from quire.server.http.h11_protocol import H11

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
            headers = [(b"content-length", length), (b"content-type", b"text/plain")]
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
        async with serving(app, head_timeout_s=0.5) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
            await asyncio.sleep(0.75)
            writer.write(b"cd")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(4) == b"fine"
            writer.close()

    run(play())


def test_the_next_request_of_a_connection_has_the_same_limit():
    async def play():
        async with serving(App(), head_timeout_s=0.5) as port:
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
        async with serving(App(BIG), unread_timeout_s=1.0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            num_left, start_s = len(BIG), time.monotonic()
            while num_left:
                data = await reader.read(min(num_left, 1 << 17))
                assert data, f"cut with {num_left} bytes to go"
                num_left -= len(data)
                await asyncio.sleep(0.02)
            assert time.monotonic() - start_s > 1.1  # longer than it may take nothing
            writer.close()

    run(play())


@pytest.mark.parametrize("name", ["head_timeout_s", "unread_timeout_s"])
def test_a_limit_must_be_above_zero(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 0"):
        ConnectionLimits(**{name: 0})


@pytest.fixture(params=["h11", "httptools"])
def parser(request, monkeypatch):
    """Each of the two HTTP parsers, where it is installed."""
    kind = H11
    if request.param == "httptools":
        pytest.importorskip("httptools")
        from quire.server.http.httptools_protocol import HttpTools as kind

    monkeypatch.setattr(connection, "protocol_class", lambda: kind)
    return request.param


def test_little_is_read_of_one_connection_at_once(monkeypatch, parser):
    """A read of a quarter of a MiB may hold 43,000 chunks of a body, each with work of its own."""
    sizes = []
    receive = connection.Connection.data_received

    def noted(self, data):
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(connection.Connection, "data_received", noted)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n"

    async def test():
        async with serving(App()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"x" * (1 << 20))
            await reader.readuntil(b"fine")
            writer.close()

    run(test())
    assert sum(sizes) == len(head) + (1 << 20) and max(sizes) <= connection.READ_BYTES


def test_bytes_sent_ahead_of_answers_are_bounded(monkeypatch, parser):
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
            await send_until_cut(port, b"no request\r\n\r\n", b"a" * 65536)
            await send_until_cut(port, b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)

    run(test())


HOST = b"Host: x\r\n"
OK = (200, "fine")


async def exchange(port, sent, *, after=b""):
    """The (status, body) of each answer until the server closes. after: sent behind the first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answers = []
    try:
        while head := await read_head(reader):
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            body = await reader.readexactly(int(fields[b"content-length"]))
            if fields[b"content-type"] == b"application/json":
                assert fields[b"connection"] == b"close"
                body = json.loads(body)["error"]["code"].encode()
            answers.append((int(head.split()[1]), body.decode()))
            writer.write(after)
            after = b""
    finally:
        writer.transport.abort()
    return answers


async def read_head(reader):
    """The head of the next answer; b"" where the connection ends instead."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        assert error.partial == b""
        return b""


def answers_to(sent, app=None, **more):
    async def play():
        async with serving(app or App()) as port:
            return await exchange(port, sent, **more)

    return run(play())


@pytest.mark.parametrize(
    "sent",
    [
        b"no request\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: +2\r\n\r\nab",
        b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length : 2\r\n\r\nab",
        b"GET / HTTP/1.1\r\n" + HOST + b"A: b\0c\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"A: b\rC: d\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"nothing\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcX\r\n0\r\n\r\n",
    ],
)
def test_invalid_requests_get_400_and_nothing_after_them_is_read(parser, sent):
    assert answers_to(sent + REQUEST) == [(400, "bad_request_head")]


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\n" + HOST + b"A: "])
def test_a_head_that_is_too_long_is_a_431(parser, start, has_end):
    """It is not sent at once: what comes in one piece with its beginning may be longer."""

    async def play():
        async with serving(RequestHead(App())) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            for _ in range(10):
                writer.write(b"a" * 8192)
                await asyncio.sleep(0.01)
            writer.write(b"\r\n\r\n" * has_end)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            assert json.loads(await reader.read())["error"]["code"] == "head_too_long"
            writer.transport.abort()

    run(play())


def test_answers_to_requests_before_one_that_is_none_come_first(parser):
    good = [OK, OK]
    assert answers_to(REQUEST * 2 + b"no request\r\n\r\n") == [*good, (400, "bad_request_head")]
    broken = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n"
    assert answers_to(REQUEST * 2 + broken) == [*good, (400, "bad_request_head")]


def test_an_answer_that_has_begun_is_not_followed_by_an_error_in_its_middle(parser):
    """The body breaks while the answer is on its way."""

    async def early(scope, receive, send):
        headers = [(b"content-length", b"4"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def play():
        async with serving(early) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
            await reader.readuntil(b"ab")
            writer.write(b"Z\r\n")
            assert await reader.read() == b""
            writer.close()

    run(play())


def test_a_request_whose_body_breaks_is_told_of_a_disconnect(parser):
    async def play():
        ended = asyncio.Event()
        kinds = []

        async def listen(scope, receive, send):
            while not kinds or kinds[-1] != "http.disconnect":
                kinds.append((await receive())["type"])
            ended.set()

        async with serving(listen) as port:
            sent = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent + b"1\r\na\r\n")
            await asyncio.sleep(0)
            writer.write(b"Z\r\n")
            await ended.wait()
            writer.transport.abort()
        assert kinds[-1] == "http.disconnect"

    run(play())


def test_every_request_of_a_connection_is_told_that_the_client_has_gone(parser):
    async def play():
        begun, gone = asyncio.Event(), asyncio.Event()

        async def wait(scope, receive, send):
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async with serving(wait) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST * 3)
            await begun.wait()
            writer.transport.abort()
            await gone.wait()

    run(play())


class Echo:
    """Answers with the request, in one line."""

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message["body"]
        names = [name for name, _ in scope["headers"] if name.startswith((b"x-", b"auth"))]
        said = b" ".join([scope["method"].encode(), scope["path"].encode(), body, *names])
        headers = [(b"content-length", str(len(said)).encode()), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said, "more_body": False})


LAST = b"GET /last HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("num_pieces", [1, 7])
def test_an_upgrade_that_is_offered_is_not_taken_and_costs_no_body(parser, num_pieces):
    """Java's client offers HTTP/2 with every request to a server without TLS."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
    sent = b"POST /a HTTP/1.1\r\n" + HOST + offer + b"X-A: 1\r\nContent-Length: 3\r\n\r\nabc"

    async def play():
        async with serving(Echo()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            size = -(-len(sent) // num_pieces)
            for start in range(0, len(sent), size):
                writer.write(sent[start : start + size])
                await asyncio.sleep(0.005)
            writer.write(LAST)
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1 200 OK") == 2
            assert b"POST /a abc x-a" in answers and answers.endswith(b"GET /last ")
            writer.close()

    run(play())


def test_a_trailer_is_no_header(parser):
    sent = (
        b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
        b"Authorization: Bearer key\r\nX-Api-Key: key\r\n\r\n"
    )
    expected = [(200, "POST /a abc"), (200, "GET /last ")]
    assert answers_to(sent + LAST, Echo()) == expected


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_a_client_of_http_1_0_gets_no_chunks(parser, method):
    """It would take them for the text: what has no length ends with the connection."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one ", b"", b"two "):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"three", "more_body": False})

    async def play():
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(method + b" / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert body == (b"" if method == b"HEAD" else b"one two three")

    run(play())
