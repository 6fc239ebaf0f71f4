"""Server-sent events and JSON answers whose work is cancelled when the client disconnects.

Called by `generation` and the routes. Independent of the engine: cancelled work aborts its requests
itself.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import QuireError
from quire.server.config import KEEP_ALIVE_S
from quire.server.http.errors import CLIENT_GONE_STATUS, error_body

T = TypeVar("T")

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
"""Media types of streams: SSE for server-sent events, NDJSON for lines of JSON."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in a stream. It keeps proxies from closing the connection; clients skip it."""

#: Answers up to this length are sent in one piece, with a Content-Length.
SHORT_ANSWER_BYTES = 256 << 10

_encode_json = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client has closed the connection and waits for no answer."""


def json_response(content: msgspec.Struct | Mapping[str, Any]) -> Response:
    """A short JSON answer with status 200."""
    return Response(_encode_json(content), media_type="application/json")


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode_json(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """A server-sent event with a name of letters, digits, dots and underscores."""
    return b"event: " + name.encode() + b"\ndata: " + _encode_json(content) + b"\n\n"


def error_event(error: QuireError) -> bytes:
    """An error in OpenAI's form, as an event."""
    return event(error_body(error))


async def unless_disconnected(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    tick: Callable[[], Awaitable[float]] | None = None,
) -> T:
    """The result of `work`. If the client disconnects, cancels `work` and raises ClientGoneError.

    `receive` must belong to a request whose body has been read. `tick` is called at once, and again
    after the number of seconds that it returned. `work` has ended when this returns or raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        while True:
            timeout_s = None if tick is None else await tick()
            await asyncio.wait((task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            if gone.done():
                raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    receive: Receive, work: Coroutine[Any, Any, None], pieces: AsyncGenerator[bytes, None]
) -> Response:
    """Run `work`, then answer with `pieces`; returns an empty response if the client has
    disconnected."""
    try:
        await unless_disconnected(receive, work)
    except ClientGoneError:
        await pieces.aclose()
        return Response(status_code=CLIENT_GONE_STATUS)
    return PieceByPiece(pieces)


class PieceByPiece(Response):
    """An unstreamed JSON answer, made piece by piece at the speed at which the client reads.

    A short answer has a Content-Length and is sent at once.
    """

    media_type = "application/json"

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        """`pieces` is closed even if sending fails."""
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            # Collect pieces up to the length of a short answer.
            held, num_held = [], 0
            async for piece in pieces:
                held.append(piece)
                num_held += len(piece)
                if num_held > SHORT_ANSWER_BYTES:
                    break
            else:
                self.headers["content-length"] = str(num_held)
                await self._begin(send)
                await _send_body(send, b"".join(held), more_body=False)
                return
            await self._begin(send)
            await _send_body(send, b"".join(held))
            held.clear()
            async for piece in pieces:
                await _send_body(send, piece)
            await _send_body(send, b"", more_body=False)

    async def _begin(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


async def _send_body(send: Send, body: bytes, *, more_body: bool = True) -> None:
    """Send a part of the body; returns once the send buffer has room again."""
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


class EventStream(Response):
    """A response of server-sent events.

    The status line is sent with the first event, so that a refusal can still have its own status,
    but at the latest after keep_alive_s, since a request may wait in the queue. After the status
    line, an error becomes an event. A disconnect closes the iterator. While a client does not read,
    the iterator is not advanced, until the time limit in `connection` ends the connection.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float = KEEP_ALIVE_S,
        *,
        end: bytes = DONE,
        keep_alive: bytes = KEEP_ALIVE,
        media_type: str = SSE,
        error_event: Callable[[QuireError], bytes] = error_event,
    ) -> None:
        """Each item of `events` is one or more events encoded by `event`; there must be at least
        one item. The iterator is closed in any case. After keep_alive_s without output,
        `keep_alive` is sent. `end` follows the last event. `error_event` encodes an error after the
        first event."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        # The second header keeps proxies such as nginx from buffering the stream.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._end = end
        self._keep_alive = keep_alive
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        outlet = _Outlet(send, head, self._keep_alive_s, self._keep_alive)
        try:
            await unless_disconnected(receive, self._send_all(outlet), outlet.keep_alive)
        except ClientGoneError:
            return

    async def _send_all(self, outlet: "_Outlet") -> None:
        async with aclosing(self._events) as events:
            try:
                async for each in events:
                    await outlet.send_body(each)
            except QuireError as error:
                if not outlet.has_begun:
                    raise
                await outlet.send_body(self._error_event(error))
        await outlet.send_body(self._end, is_last=True)


class _Outlet:
    """Sends the messages of one stream: its events and its keep-alive comments.

    Invariant: the head is sent once and first; one message is sent at a time.
    """

    def __init__(
        self, send: Send, head: Message, keep_alive_s: float, keep_alive: bytes = KEEP_ALIVE
    ) -> None:
        self.has_begun = False
        self._send = send
        self._head = head
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._lock = asyncio.Lock()
        self._last_s = time.monotonic()

    async def send_body(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body; returns once the send buffer has room again."""
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                await self._send(self._head)
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._last_s = time.monotonic()

    async def keep_alive(self) -> float:
        """Send a keep-alive if it is time; returns the seconds until the next check."""
        if self._lock.locked():  # a message is being sent
            return self._keep_alive_s
        left_s = self._last_s + self._keep_alive_s - time.monotonic()
        if left_s > 0:
            return left_s
        await self.send_body(self._keep_alive)
        return self._keep_alive_s
