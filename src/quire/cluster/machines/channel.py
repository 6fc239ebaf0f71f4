"""TLS connection between an API server and an agent: greeting, messages and heartbeats.

    API server -> agent    ServerGreeting
    agent -> API server    Welcome or Refused
    then both ways         [bytes after these four | kind of the message | message]

TLS encrypts everything, and each end has proved that it has the cluster's key before it can send a
message. If one end sends nothing for `heartbeat_s`, the other end closes the connection, even if
TCP still considers it connected. Used by `remote_link` and `agent`.
"""

import asyncio
import ssl
import struct
from enum import IntEnum
from typing import Protocol

import msgspec

from quire.cluster.machines.agent_messages import (
    VERSION,
    Beat,
    Refused,
    ServerGreeting,
    decode_answer,
    decode_greeting,
)
from quire.cluster.machines.cluster_key import refusal
from quire.ipc import MAX_MESSAGE_BYTES, FrameSplitter, MessageError, encode

BEATS_PER_HEARTBEAT = 4
CLOSE_TIMEOUT_S = 5.0
"""Seconds within which the other end has to confirm that the connection closes."""
MAX_UNREAD_BYTES = 256 << 20
"""Maximum number of sent bytes that the other end has not read. The limit is larger than a full
queue of requests, since an API server sends prompts as fast as clients do."""
_LENGTH_BYTES = 4
_HEAD = struct.Struct(">IB")  # bytes after the length, kind


class FrameKind(IntEnum):
    """The kind of message in a frame."""

    #: A message between API server and agent.
    AGENT = 0
    #: A message between API server and engine, which the agent passes on undecoded.
    ENGINE = 1


class FrameHandler(Protocol):
    """Receives the frames of a channel."""

    def on_frame(self, kind: FrameKind, body: bytes) -> None:
        """Handle the next message. Raises MessageError, which ends the connection."""
        ...

    def on_closed(self) -> None:
        """Handle the end of the connection. Called once, after all other calls."""
        ...


class AgentChannel(asyncio.Protocol):
    """One end of a connection. The first message is the greeting. `start` sets the handler of all
    later messages.

    Invariant: after `on_closed` nothing is sent or passed on.
    """

    def __init__(self) -> None:
        """Create the channel without a connection. `connect` and `accept` add the connection."""
        self._loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        #: The other end's first message; None if the connection ended before it came.
        self._greeting: asyncio.Future[bytes | None] = self._loop.create_future()
        self._handler: FrameHandler | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.last_heard_s = self._loop.time()

    async def greeting(self) -> bytes:
        """Wait for the other end's first message. Raises ConnectionResetError."""
        body = await self._greeting
        if body is None:
            raise ConnectionResetError("the other end closed the connection")
        return body

    def start(self, handler: FrameHandler) -> None:
        """Pass messages to `handler` from now on, since the greeting is over."""
        self._handler = handler
        if self._is_closed:
            self._loop.call_soon(handler.on_closed)

    def beat(self, heartbeat_s: float) -> None:
        """Send beats from now on, and close the connection when the other end says nothing for
        `heartbeat_s`."""
        if self._is_closed:
            return
        now_s = self._loop.time()
        interval_s = heartbeat_s / BEATS_PER_HEARTBEAT
        # If this process itself was stopped, the other end gets one more interval to be heard.
        was_away = self._beat is not None and now_s > self._beat.when() + interval_s
        if now_s - self.last_heard_s >= heartbeat_s and not was_away:
            self.abort()
            return
        self.send_message(Beat())
        left_s = self.last_heard_s + heartbeat_s - now_s
        pause_s = min(interval_s, left_s) if left_s > 0 else interval_s
        self._beat = self._loop.call_later(pause_s, self.beat, heartbeat_s)

    def send(self, kind: FrameKind, body: bytes) -> None:
        """Send a message, given without its length. When more than MAX_UNREAD_BYTES are unread, the
        connection is closed even if beats arrive, so that the buffer stays bounded. Raises
        MessageError if the message is too long."""
        if len(body) >= MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {len(body)} bytes is above {MAX_MESSAGE_BYTES - 1}")
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(_HEAD.pack(1 + len(body), kind) + body)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message between API server and agent."""
        self.send(FrameKind.AGENT, encode(message)[_LENGTH_BYTES:])

    def close(self) -> None:
        """Close the connection after the buffered bytes are sent."""
        # After a second close, asyncio would drop the connection and ignore a later `abort`.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        # TLS has checked these bytes, so even a part of a message is a sign of life.
        self.last_heard_s = self._loop.time()
        try:
            for frame in self._splitter.feed(data):
                self._take(frame)
        except MessageError:
            self.abort()

    def _take(self, frame: bytes) -> None:
        if not frame or frame[0] not in (FrameKind.AGENT, FrameKind.ENGINE):
            raise MessageError("a frame has no kind, or an unknown one")
        if self._handler is not None:
            self._handler.on_frame(FrameKind(frame[0]), frame[1:])
        elif not self._greeting.done():
            self._greeting.set_result(frame[1:])
        else:
            raise MessageError("the other end has sent a message before the greeting was over")

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._beat is not None:
            self._beat.cancel()
        if not self._greeting.done():
            self._greeting.set_result(None)
        if self._handler is not None:
            self._handler.on_closed()


async def connect(
    host: str, port: int, tls: ssl.SSLContext, server_id: str, handler: FrameHandler
) -> AgentChannel:
    """Connect an API server to an agent and greet it. Raises OSError if there is no agent, or if
    the agent has another key or refuses."""
    channel = AgentChannel()
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(
            lambda: channel, host, port, ssl=tls, ssl_shutdown_timeout=CLOSE_TIMEOUT_S
        )
        channel.send_message(ServerGreeting(VERSION, server_id))
        answer = decode_answer(await channel.greeting())
        if isinstance(answer, Refused):
            raise MessageError(answer.message)
    except BaseException as error:
        channel.abort()
        if isinstance(error, ssl.SSLError):
            raise ConnectionRefusedError(f"the agent can't be used: {refusal(error)}") from error
        if isinstance(error, (MessageError, ConnectionResetError)):
            raise ConnectionRefusedError(f"the agent can't be used: {error}") from error
        raise
    channel.start(handler)
    return channel


async def accept(
    transport: asyncio.Transport, tls: ssl.SSLContext
) -> tuple[AgentChannel, ServerGreeting]:
    """Make a channel of a TCP connection from which nothing was read, and receive the greeting of
    the API server.

    Raises OSError or MessageError if the other end is no API server or has another key. The
    connection is then closed.
    """
    channel = AgentChannel()
    loop = asyncio.get_running_loop()
    try:
        secured = await loop.start_tls(
            transport, channel, tls, server_side=True, ssl_shutdown_timeout=CLOSE_TIMEOUT_S
        )
        if secured is None:  # the connection was lost meanwhile
            raise ConnectionResetError("the other end closed the connection")
        channel.connection_made(secured)
        greeting = decode_greeting(await channel.greeting())
    except BaseException:
        transport.abort()
        raise
    return channel, greeting
