"""Answers that end with their client: server-sent events, and work that a disconnect cancels.

Called by the API families. Knows no engine: cancelling the work is what aborts a request.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.server.errors import error_body

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_encode_json = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client has closed the connection; nobody waits for the answer."""


def json_response(content: msgspec.Struct) -> Response:
    """A whole answer."""
    return Response(_encode_json(content), media_type="application/json")


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode_json(content) + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGoneError raised, if the client goes.

    receive: of a request whose body has been read. Whichever way this ends, `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(receive: Receive, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The JSON of what `work` returns, or an empty response that nobody receives."""
    try:
        return json_response(await unless_disconnected(receive, work))
    except ClientGoneError:
        return Response(status_code=499)


class EventStream(Response):
    """A response of server-sent events, ended by [DONE].

    The status line waits for the first event, so that a refusal can still be told by its status; an
    error after that becomes an event. A client that goes away closes the iterator.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        """events: at least one, encoded by `event`; the iterator is closed however this ends."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await _send_body(send, first)
            try:
                await self._send_rest(events, send)
            except QuireError as error:
                await _send_body(send, event(error_body(error)))
        await _send_body(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rest(self, events: AsyncIterator[bytes], send: Send) -> None:
        async for each in events:
            await _send_body(send, each)


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
