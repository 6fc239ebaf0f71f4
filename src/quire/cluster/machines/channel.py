"""A connection between a front and an agent that hold the same key.

Sends and receives sealed frames, and beats: an end that says nothing for `heartbeat_s` is given up,
whatever TCP believes. Used by `remote_link` and `agent`, which do the handshake on streams first.
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
"""For so long the bytes of an unfinished frame count as a sign of life."""
MAX_UNREAD_BYTES = 256 << 20
"""Above what the calls of a full queue take: a front sends prompts as fast as they come."""
_LENGTH_BYTES = 4

_decode_by_front = decoder(AgentHello | Welcome | Refused, "an agent")
_decode_by_agent = decoder(FrontHello, "a front")


class FrameHandler(Protocol):
    """Takes what comes over a channel."""

    def on_frame(self, channel: FrameKind, body: bytes) -> None:
        """The next message. Raises MessageError, which ends the connection."""
        ...

    def on_closed(self) -> None:
        """The connection is gone; called once, and last."""
        ...


class SecureChannel(asyncio.Protocol):
    """Invariant: after `on_closed` nothing is sent or handed on."""

    def __init__(self, handler: FrameHandler, sealer: Sealer, opener: Opener) -> None:
        """Takes over a connection by `take_over`."""
        self._handler = handler
        self._sealer = sealer
        self._opener = opener
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._writer: asyncio.StreamWriter | None = None  # kept: it closes what it leaves behind
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.last_heard_s = self._opened_s = self._loop.time()

    def take_over(self, writer: asyncio.StreamWriter) -> None:
        """The handshake is done: what comes from now on are frames."""
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._writer = transport, writer
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_protocol(self)
        transport.resume_reading()

    def beat(self, heartbeat_s: float) -> None:
        """From now on, say that this end lives, and give up the other one when it says nothing for
        heartbeat_s."""
        if self._is_closed:
            return
        now_s = self._loop.time()
        interval_s = heartbeat_s / BEATS_PER_HEARTBEAT
        # An end that was stopped itself gives the other one the time of a beat to be heard.
        was_away = self._beat is not None and now_s > self._beat.when() + interval_s
        if now_s - self.last_heard_s >= heartbeat_s and not was_away:
            self.abort()
            return
        self.send(FrameKind.AGENT, encode(Beat())[_LENGTH_BYTES:])
        left_s = self.last_heard_s + heartbeat_s - now_s
        pause_s = min(interval_s, left_s) if left_s > 0 else interval_s
        self._beat = self._loop.call_later(pause_s, self.beat, heartbeat_s)

    def send(self, channel: FrameKind, body: bytes) -> None:
        """body: a message without its length. An end that doesn't read while MAX_UNREAD_BYTES wait
        for it is given up, though it may beat: nothing is kept for it without bound."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._sealer.seal(channel, body))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()

    def send_message(self, message: msgspec.Struct) -> None:
        """A message between front and agent."""
        self.send(FrameKind.AGENT, encode(message)[_LENGTH_BYTES:])

    def close(self) -> None:
        """After what was sent is on its way."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now_s = self._loop.time()
        # Bytes of a large frame show life only for a while: whoever is between could send some.
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
    """The front's part of the handshake. Raises OSError where there is no agent, or none that has
    the key, or it refuses."""
    try:
        hello = await _read(reader, _decode_by_front)
        if not isinstance(hello, AgentHello) or hello.version != VERSION:
            raise MessageError("it is no agent, or one of another version of quire")
        nonce = new_nonce()
        keys = Keys(key, hello.nonce, nonce)
        writer.write(encode(FrontHello(VERSION, nonce, front_id, keys.made("front"))))
        answer = await _read(reader, _decode_by_front)
        if not isinstance(answer, Welcome):
            # It has not shown that it has the key: no text of its own may look like a log line.
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
    """The agent's part. welcome: from the front's hello and our proof, what is answered; raises
    EngineDeadError to refuse. Raises MessageError, AuthenticationError, EngineDeadError, OSError.
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
