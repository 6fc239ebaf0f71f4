"""Bounds how long a request's body may be, and how long it may take to come.

Set up by `app`, inside the guard, so that only who may call gets to send a body. Knows nothing of
what is in it: `json_pieces` bounds that.
"""

import asyncio
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import (
    BodyTooLongError,
    QuireError,
    RequestTimeoutError,
)
from quire.server.http.errors import error_response

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0

MIN_BYTES_PER_S = 16 << 10
"""Whoever sends at least so fast has all the time that the length of the body needs."""


class BodyLimit:
    """Refuses a body that is too long, at once where its length is announced, else as it comes, and
    one that is too slow."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int = MAX_BODY_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """timeout_s: for the first byte and the last, plus a second for each MIN_BYTES_PER_S."""
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announced_bytes(scope) > self._max_bytes:
            await error_response(scope, _too_long(self._max_bytes))(scope, receive, send)
        else:
            body = _Body(receive, self._max_bytes, self._timeout_s)
            await self._app(scope, body.receive, send)


class _Body:
    """A `receive` that keeps count until the body is whole; after that it is the server's own."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises HTTPException, the only kind that FastAPI lets through where it reads a body."""
        if self._is_whole:
            return await self._receive()
        try:
            allowed_s = self._num_bytes / MIN_BYTES_PER_S
            async with asyncio.timeout_at(self._deadline_s + allowed_s):
                message = await self._receive()
        except TimeoutError:
            _refuse(
                RequestTimeoutError(
                    f"after {self._timeout_s + allowed_s:.0f} seconds only {self._num_bytes} bytes "
                    "of the body have come; send it faster"
                )
            )
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            _refuse(_too_long(self._max_bytes))
        if not message.get("more_body", False):
            self._is_whole = True
        return message


def _announced_bytes(scope: Scope) -> int:
    """The Content-Length; 0 where there is none, as for a body in chunks."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _too_long(max_bytes: int) -> BodyTooLongError:
    return BodyTooLongError(f"the body is longer than {max_bytes} bytes; send less in one request")


def _refuse(error: QuireError) -> NoReturn:
    """Raise `error` as the cause of an HTTPException, which `errors` looks for."""
    raise HTTPException(error.http_status, str(error)) from error
