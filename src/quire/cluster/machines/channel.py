"""Authenticated connection between an API server (front) and an agent that hold the same key.

It sends and receives sealed frames and heartbeats. If one end sends nothing for `heartbeat_s`, the
other end closes the connection, even if TCP still considers it connected. Used by `remote_link` and
`agent`, which first do the handshake on streams.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from quire.cluster.machines.agent_messages import Beat
from quire.cluster.machines.secure_frames import (
    VERSION,
    AgentHello,
    FrameKind,
    FrontHello,
    Keys,
    Opener,
    Refused,
    Sealer,
    Welcome,
    new_nonce,
)
from quire.errors import AuthenticationError, EngineDeadError
from quire.ipc import FrameSplitter, MessageError, decoder, encode

BEATS_PER_HEARTBEAT = 4
MAX_HELLO_BYTES = 4096
MAX_FRAME_S = 30.0
"""Seconds for which the bytes of an unfinished frame count as a sign of life."""
MAX_UNREAD_BYTES = 256 << 20
"""Maximum number of sent bytes that the other end has not read. It is above the size of a full
queue of requests, since a front sends prompts as fast as they come."""
_LENGTH_BYTES = 4

_decode_by_front = decoder(AgentHello | Welcome | Refused, "an agent")
_decode_by_agent = decoder(FrontHello, "a front")


class FrameHandler(Protocol):
    """Receives the frames of a channel."""

    def on_frame(self, channel: FrameKind, body: bytes) -> None:
        """Handle the next message. Raises MessageError, which ends the connection."""
        ...

    def on_closed(self) -> None:
        """Handle the end of the connection. Called once, as the last call."""
        ...


class SecureChannel(asyncio.Protocol):
    """A connection after its handshake. Invariant: after `on_closed` nothing is sent or passed
    on."""

    def __init__(self, handler: FrameHandler, sealer: Sealer, opener: Opener) -> None:
        """Create the channel without a connection; `take_over` gives it one."""
        self._handler = handler
        self._sealer = sealer
        self._opener = opener
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        #: Kept because a stream writer closes its connection when it is deleted.
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.last_heard_s = self._opened_s = self._loop.time()

    def take_over(self, writer: asyncio.StreamWriter) -> None:
        """Receive frames from now on, since the handshake is done."""
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._writer = transport, writer
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_protocol(self)
        transport.resume_reading()

    def beat(self, heartbeat_s: float) -> None:
        """Send beats from now on, and give up the other end when it says nothing for
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
        self.send(FrameKind.AGENT, encode(Beat())[_LENGTH_BYTES:])
        left_s = self.last_heard_s + heartbeat_s - now_s
        pause_s = min(interval_s, left_s) if left_s > 0 else interval_s
        self._beat = self._loop.call_later(pause_s, self.beat, heartbeat_s)

    def send(self, channel: FrameKind, body: bytes) -> None:
        """Send a message, given without its length. The connection is given up when more than
        MAX_UNREAD_BYTES are unread, even if beats arrive, so that the buffer stays bounded."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._sealer.seal(channel, body))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message between front and agent."""
        self.send(FrameKind.AGENT, encode(message)[_LENGTH_BYTES:])

    def close(self) -> None:
        """Close the connection after the buffered bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now_s = self._loop.time()
        # Bytes of an unfinished frame count only for a while, since they are not authenticated yet.
        if now_s - self._opened_s < MAX_FRAME_S:
            self.last_heard_s = now_s
        try:
            for frame in self._splitter.feed(data):
                opened = self._opener.open(frame)
                if opened is not None:
                    self.last_heard_s = self._opened_s = now_s
                    self._handler.on_frame(*opened)
        except MessageError:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._beat is not None:
            self._beat.cancel()
        self._handler.on_closed()


async def greet_agent(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    front_id: str,
    handler: FrameHandler,
) -> tuple[SecureChannel, Welcome]:
    """The front's part of the handshake. Raises OSError if there is no agent, or if the agent lacks
    the key or refuses."""
    try:
        hello = await _read(reader, _decode_by_front)
        if not isinstance(hello, AgentHello) or hello.version != VERSION:
            raise MessageError("it is no agent, or one of another version of quire")
        nonce = new_nonce()
        keys = Keys(key, hello.nonce, nonce)
        writer.write(encode(FrontHello(VERSION, nonce, front_id, keys.made("front"))))
        answer = await _read(reader, _decode_by_front)
        if not isinstance(answer, Welcome):
            # The agent has not proved that it has the key, so its text is made harmless for the
            # log.
            said = answer.message if isinstance(answer, Refused) else "no answer"
            raise MessageError("".join(each if each.isprintable() else "?" for each in said[:200]))
        keys.check("agent", answer.proof)
    except (MessageError, AuthenticationError, asyncio.IncompleteReadError, EOFError) as error:
        raise ConnectionRefusedError(f"the agent can't be used: {error}") from error
    channel = SecureChannel(handler, Sealer(keys.made("to agent")), Opener(keys.made("to front")))
    channel.take_over(writer)
    return channel, answer


async def greet_front(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    welcome: Callable[[FrontHello, bytes], Welcome],
    handler: FrameHandler,
) -> tuple[SecureChannel, FrontHello]:
    """The agent's part of the handshake.

    `welcome` makes the answer from the front's hello and our proof, and raises EngineDeadError to
    refuse. Raises MessageError, AuthenticationError, EngineDeadError or OSError.
    """
    nonce = new_nonce()
    writer.write(encode(AgentHello(VERSION, nonce)))
    hello: FrontHello = await _read(reader, _decode_by_agent)
    if hello.version != VERSION:
        raise MessageError(f"the front has version {hello.version} of the protocol, not {VERSION}")
    keys = Keys(key, nonce, hello.nonce)
    keys.check("front", hello.proof)
    try:
        answer = welcome(hello, keys.made("agent"))
    except EngineDeadError as error:
        writer.write(encode(Refused(str(error))))
        raise
    writer.write(encode(answer))
    channel = SecureChannel(handler, Sealer(keys.made("to front")), Opener(keys.made("to agent")))
    channel.take_over(writer)
    return channel, hello


async def _read(reader: asyncio.StreamReader, decode: Callable[[bytes], Any]) -> Any:
    num_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if num_bytes > MAX_HELLO_BYTES:
        raise MessageError(f"a greeting announces {num_bytes} bytes")
    return decode(await reader.readexactly(num_bytes))
