"""A connection between an API server and an agent, also with a stranger on the wire."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.cluster.machines.cluster_keys import KEY
from tests.cluster.test_fleet import until

from quire.cluster.machines import channel as channel_module
from quire.cluster.machines.agent import Agent
from quire.cluster.machines.agent_messages import ServerGreeting, Welcome
from quire.cluster.machines.channel import AgentChannel, FrameKind, accept, connect
from quire.cluster.machines.cluster_key import tls_context
from quire.ipc import MessageError

SERVER = tls_context(KEY, ssl.PROTOCOL_TLS_SERVER)
CLIENT = tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)
RECORD_HEAD = 5
APPLICATION_DATA = 23


class Kept:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, bytes]] = []
        self.num_ends = 0

    def on_frame(self, kind: FrameKind, body: bytes) -> None:
        assert not self.num_ends
        self.frames.append((kind, body))

    def on_closed(self) -> None:
        self.num_ends += 1


class Wire:
    """Everything between the two ends: it may change the TLS records of the API server."""

    def __init__(self) -> None:
        self.seen = b""
        #: What is sent on for a record.
        self.change: Callable[[bytes], bytes] = lambda record: record
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int) -> int:
        self._target = port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += (writer, back)
        for way in (self._pass_records(reader, back), self._pass_on(there, writer)):
            self._tasks.append(asyncio.ensure_future(way))

    async def _pass_records(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await source.readexactly(RECORD_HEAD)
                record = head + await source.readexactly(int.from_bytes(head[3:], "big"))
                self.seen += record
                sink.write(self.change(record) if head[0] == APPLICATION_DATA else record)
        except (asyncio.IncompleteReadError, ConnectionError):
            sink.close()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                self.seen += data
                sink.write(data)
        except ConnectionError:
            pass
        sink.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()


class Pair:
    """Two connected ends, with a wire between them."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.at_server, self.at_agent = Kept(), Kept()
        self.server: AgentChannel | None = None
        self.agent: AgentChannel | None = None
        self.greeting: ServerGreeting | None = None

    async def open(self) -> None:
        self.listener = await asyncio.get_running_loop().create_server(
            lambda: Accepted(self._greet), "127.0.0.1", 0
        )
        port = await self.wire.start(self.listener.sockets[0].getsockname()[1])
        self.server = await connect("127.0.0.1", port, CLIENT, "server/0", self.at_server)

    async def _greet(self, transport: asyncio.Transport) -> None:
        self.agent, self.greeting = await accept(transport, SERVER)
        self.agent.send_message(Welcome())
        self.agent.start(self.at_agent)

    async def close(self) -> None:
        for end in (self.server, self.agent):
            if end is not None:
                end.abort()
        await self.wire.close()
        self.listener.close()
        await asyncio.sleep(0.01)  # the transports close in the loop's next turns


class Accepted(asyncio.Protocol):
    def __init__(self, greet: Callable[[asyncio.Transport], Awaitable[None]]) -> None:
        self._greet = greet

    def connection_made(self, transport: Any) -> None:
        transport.pause_reading()
        self._task = asyncio.ensure_future(self._greet(transport))


def with_pair(test: Callable[[Pair], Awaitable[None]]) -> None:
    async def run() -> None:
        pair = Pair()
        try:
            await pair.open()
            await test(pair)
        finally:
            await pair.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_messages_of_any_length_arrive_both_ways_in_order() -> None:
    bodies = [b"", b"a", bytes(100), bytes(range(256)) * 4000]

    async def test(pair: Pair) -> None:
        assert pair.greeting is not None and pair.greeting.server_id == "server/0"
        for sender, handler in ((pair.server, pair.at_agent), (pair.agent, pair.at_server)):
            for kind in FrameKind:
                for body in bodies:
                    sender.send(kind, body)
            await until(lambda handler=handler: len(handler.frames) == 2 * len(bodies))
            assert handler.frames == [(kind, body) for kind in FrameKind for body in bodies]

    with_pair(test)


def test_nothing_of_a_message_can_be_read_on_the_wire() -> None:
    async def test(pair: Pair) -> None:
        pair.server.send(FrameKind.ENGINE, b"a secret prompt")
        pair.agent.send(FrameKind.ENGINE, b"a secret answer")
        await until(lambda: bool(pair.at_agent.frames and pair.at_server.frames))
        assert len(pair.wire.seen) > 1000
        assert b"secret" not in pair.wire.seen and b"server/0" not in pair.wire.seen

    with_pair(test)


def flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        (flipped, [b"before"]),
        (lambda record: record * 2, [b"before", b"touched"]),
        (lambda record: b"", [b"before"]),
    ],
    ids=["changed", "repeated", "left out"],
)
def test_changed_repeated_or_missing_record_ends_the_connection(
    change: Callable[[bytes], bytes], possible: list[bytes]
) -> None:
    async def test(pair: Pair) -> None:
        def once(record: bytes) -> bytes:
            pair.wire.change = lambda record: record
            return change(record)

        pair.server.send(FrameKind.ENGINE, b"before")
        await until(lambda: len(pair.at_agent.frames) == 1)
        pair.wire.change = once
        pair.server.send(FrameKind.ENGINE, b"touched")
        await until(lambda: pair.wire.change is not once)
        pair.server.send(FrameKind.ENGINE, b"after")
        await until(lambda: pair.at_agent.num_ends == 1 and pair.at_server.num_ends == 1)
        taken = [body for _, body in pair.at_agent.frames]
        assert taken in (possible, possible[:1])

    with_pair(test)


@pytest.mark.parametrize(
    "bytes_of_the_server", [b"\0\0\0\0", b"\0\0\0\1\x02", b"\xff\xff\xff\xff"], ids=str
)
def test_invalid_frame_ends_the_connection(bytes_of_the_server: bytes) -> None:
    async def test(pair: Pair) -> None:
        pair.server._transport.write(bytes_of_the_server)
        await until(lambda: pair.at_agent.num_ends == 1 and pair.at_server.num_ends == 1)
        assert not pair.at_agent.frames

    with_pair(test)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 100)

    async def test(pair: Pair) -> None:
        pair.server.send(FrameKind.ENGINE, bytes(99))
        with pytest.raises(MessageError, match="100 bytes is above 99"):
            pair.server.send(FrameKind.ENGINE, bytes(100))
        await until(lambda: len(pair.at_agent.frames) == 1)

    with_pair(test)


def test_messages_sent_before_a_close_arrive() -> None:
    async def test(pair: Pair) -> None:
        pair.server.send(FrameKind.ENGINE, bytes(8 << 20))
        pair.server.close()
        pair.server.send(FrameKind.ENGINE, b"too late")
        await until(lambda: pair.at_agent.num_ends == 1 and pair.at_server.num_ends == 1)
        assert [len(body) for _, body in pair.at_agent.frames] == [8 << 20]

    with_pair(test)


def test_abort_ends_a_close_that_the_other_end_does_not_confirm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "CLOSE_TIMEOUT_S", 60.0)

    async def test(pair: Pair) -> None:
        pair.wire.change = lambda record: b""
        pair.server.close()
        pair.server.close()
        await asyncio.sleep(0.05)
        assert not pair.at_server.num_ends
        pair.server.abort()
        await until(lambda: pair.at_server.num_ends == 1)

    with_pair(test)


def test_silent_connection_is_closed_after_a_heartbeat() -> None:
    async def test(pair: Pair) -> None:
        pair.agent.beat(0.2)
        pair.server.beat(60.0)
        await asyncio.sleep(0.05)
        assert not pair.at_agent.num_ends
        pair.wire.change = lambda record: b""
        await until(lambda: pair.at_agent.num_ends == 1)

    with_pair(test)


def test_connection_lost_before_start_is_reported_to_the_handler() -> None:
    async def run() -> None:
        channel, handler = AgentChannel(), Kept()
        channel.connection_lost(None)
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            await channel.greeting()
        channel.start(handler)
        await asyncio.sleep(0)
        assert handler.num_ends == 1

    asyncio.run(run())


def test_server_of_another_version_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_module, "VERSION", 99)

    async def run() -> None:
        agent = Agent(KEY, ["false"])
        try:
            port = await agent.listen("127.0.0.1", 0)
            with pytest.raises(ConnectionRefusedError, match="version 3 of the messages, not 99"):
                await connect("127.0.0.1", port, CLIENT, "f", Kept())
        finally:
            await agent.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert "not 99" in caplog.text


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\2\x90\x00"], ids=str
)
def test_bytes_that_are_no_tls_are_refused_in_one_sentence(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        agent = Agent(KEY, ["false"])
        try:
            port = await agent.listen("127.0.0.1", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            await asyncio.wait_for(reader.read(), 40)
            writer.close()
        finally:
            await agent.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "a connection was refused: the other end does not speak TLS 1.3" in record.message
