"""Time limits of HTTP connections, and answers to malformed requests.

Without limits, a client that sends no head or does not read its answer would hold a connection, and
the answer's memory, indefinitely. The time for a body is bounded in the application, by
`guard.BodyLimit`. Called by `launch`.

This file, `h11_protocol` and `httptools_protocol` subclass or drive uvicorn's protocol classes and
read their attributes (`cycle`, `pipeline`, ...), which uvicorn does not promise to keep. Run the
tests of this folder with and without httptools before you raise uvicorn's version.
"""

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, ClassVar, cast

from quire.errors import ConfigurationError, QuireError
from quire.server.http.errors import error_body
from quire.server.http.guard import RequestHeadError
from quire.server.http.h11_protocol import H11
from quire.server.http.open_connections import OpenConnections

SEND_BUFFER_BYTES = 128 << 10
"""Size of the kernel's send buffer. By default it grows to megabytes for each client that does not
read, and a slow client would seem not to read until a third of the buffer is free."""

READ_BYTES = 32 << 10
"""Maximum bytes read from one connection in one turn of the event loop. asyncio's default, 256 KiB,
can hold 43,000 chunks of one byte, which block the loop for 13 ms in httptools, 250 ms in h11."""

MAX_AHEAD_BYTES = 16 << 20
MAX_AHEAD_REQUESTS = 128
"""The maximum numbers of bytes and of complete requests that a client may send before the current
answer is complete. The bytes include an incomplete head and a body that is no longer read. h11 has
similar bounds; httptools has none."""

LINGER_S = 2.0
"""Seconds for which a refused client may go on sending. If the connection were closed at once, the
client might not receive the error."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The times after which a connection is closed, in seconds."""

    #: Time for a request's head, from the connection's beginning or from the first byte after an
    #: answer.
    head_timeout_s: float = 30.0
    #: Time for which the client may read nothing while the send buffers are full.
    unread_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("head_timeout_s", "unread_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be above 0")


def connection_class(
    limits: ConnectionLimits, connections: OpenConnections | None = None
) -> type["Connection"]:
    """The class for uvicorn's option `http`, with these limits. Its instances report their state to
    `connections`, which counts them once `listener` has admitted them."""
    protocol_class()  # import it now, since file descriptors may run out later
    own = {"limits": limits, "connections": connections or OpenConnections()}
    return type("LimitedConnection", (Connection,), own)


@cache
def protocol_class() -> Any:
    """uvicorn's protocol class: on httptools if it is installed, else on h11."""
    if find_spec("httptools") is None:
        return H11
    # needs an extra that may be missing
    from quire.server.http.httptools_protocol import HttpTools

    return HttpTools


class _Timer:
    """Calls `action` once, `delay_s` after `start`, unless it is stopped before."""

    def __init__(self, delay_s: float, action: Callable[[], None]) -> None:
        self._delay_s = delay_s
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer unless it runs already."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(self._delay_s, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(asyncio.Protocol):
    """uvicorn's protocol, with timers around it.

    Invariant: the head's timer runs while no request is being answered and the next head is
    incomplete. The reader's timer runs while the transport's buffer is full. `connections` records
    whether the connection waits for its client.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    connections: ClassVar[OpenConnections] = OpenConnections()

    def __init__(self, **from_uvicorn: Any) -> None:
        self._inner: Any = protocol_class()(**from_uvicorn)
        self._inner.refuse = self._refuse
        self._inner.on_answered = self._record_state
        self._is_refused = False
        self._transport: asyncio.Transport | None = None
        self._cycle: Any = None  # uvicorn's last request
        self._num_ahead = 0  # bytes received after that request
        self._head = _Timer(self.limits.head_timeout_s, self._cut)
        self._reader = _Timer(self.limits.unread_timeout_s, self._cut)
        self._linger = _Timer(LINGER_S, self._cut)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(transport, "max_size"):  # asyncio's own transports have it
            transport.max_size = READ_BYTES
        self._bound_in_kernel(transport)
        self._inner.connection_made(transport)
        self._head.start()
        self._record_state()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_ahead += len(data)
            if self._num_ahead > MAX_AHEAD_BYTES:
                self._cut()
            return
        self._inner.data_received(data)
        self._record_state()
        cycle = self._inner.cycle  # the last request with a complete head
        if cycle is None or cycle.response_complete:
            self._head.start()
        else:
            self._head.stop()
        if cycle is not self._cycle:
            self._cycle, self._num_ahead = cycle, 0
        elif cycle is None or cycle.response_complete or not cycle.more_body:
            self._num_ahead += len(data)
        num_requests = len(getattr(self._inner, "pipeline", ()))  # only httptools has it
        if self._num_ahead > MAX_AHEAD_BYTES or num_requests > MAX_AHEAD_REQUESTS:
            self._cut()

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        self._reader.stop()

    def connection_lost(self, error: Exception | None) -> None:
        self._head.stop()
        self._reader.stop()
        self._linger.stop()
        self._inner.connection_lost(error)
        self.connections.remove(self)

    def close_idle(self) -> None:
        """Close this connection, which waits for its client, to make room for another."""
        if self._transport is not None:
            self._transport.close()

    def _record_state(self) -> None:
        cycle = self._inner.cycle
        if cycle is None or cycle.response_complete:
            self.connections.record_waiting(self)
        elif cycle.more_body and not getattr(self._inner, "pipeline", ()):
            self.connections.record_uploading(self)
        else:
            self.connections.record_answering(self)

    def _refuse(self, error: RequestHeadError) -> None:
        """Answer malformed input, read no more, and close once the client has the answer."""
        assert self._transport is not None, "there is no data before a connection"
        self._is_refused = True
        if (cycle := self._inner.cycle) is not None and not cycle.response_complete:
            cycle.disconnected = True  # its request will never be complete
            cycle.message_event.set()
        self._head.stop()
        self._transport.write(answer_to(error, self._inner.server_state.default_headers))
        self._linger.start()
        self._transport.write_eof()

    def _cut(self) -> None:
        """Close at once without sending buffered data. The application sees a disconnect."""
        if self._transport is not None:
            self._transport.abort()

    def _bound_in_kernel(self, transport: asyncio.BaseTransport) -> None:
        """Bound how much of an unread answer the kernel holds, and for how long.

        The timers of this class stop when the rest of an answer is in the kernel's buffer. Only
        Linux has an option to bound the time from then on.
        """
        sock = transport.get_extra_info("socket")
        if sock is None:
            return
        with contextlib.suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                timeout_ms = max(1, round(self.limits.unread_timeout_s * 1000))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def answer_to(error: QuireError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The bytes of an HTTP response that has this error and closes the connection. `headers` are
    the headers of every response."""
    body = json.dumps(error_body(error)).encode()
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if error.retry_after_s is not None:
        own.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    lines = [b"%b: %b\r\n" % header for header in (*headers, *own)]
    status = HTTPStatus(error.http_status)
    first = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    return b"".join([first, *lines, b"\r\n", body])
