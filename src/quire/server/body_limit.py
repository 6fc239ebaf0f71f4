"""Bounds how long a request's body may be, how long it may take to come, and to be parsed.

Set up by `app`, inside the guard, so that only who may call gets to send a body. Of what is in it
this knows only how to count values in JSON.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import (
    BodyTooLongError,
    InvalidRequestError,
    QuireError,
    RequestTimeoutError,
)
from quire.server.errors import error_response

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0

MIN_BYTES_PER_S = 16 << 10
"""Whoever sends at least so fast has all the time that the length of the body needs."""

MAX_VALUES = 2_000_000
MAX_PARTS = 200_000
"""Of a body in JSON: values of any kind; lists, objects and fields of objects. All streams wait
while one is parsed and checked: 0.2 s at these bounds, and seconds for 32 MiB of [1],[1],[1]."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A text, or the rest of the body where it does not end. It always matches, and nothing is tried
twice, so that all texts together take one pass."""


class BodyLimit:
    """Refuses a body that is too long, at once where its length is announced, else as it comes, one
    that is too slow, and one that has too many values."""

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
        self._pieces: list[bytes] = []

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
        self._pieces.append(message.get("body", b""))
        self._num_bytes += len(self._pieces[-1])
        if self._num_bytes > self._max_bytes:
            _refuse(_too_long(self._max_bytes))
        if not message.get("more_body", False):
            self._is_whole = True
            if has_too_many_values(self._pieces):
                _refuse(
                    InvalidRequestError(
                        f"the body has more than {MAX_VALUES} values, or more than {MAX_PARTS} "
                        "lists, objects and fields; send less in one request"
                    )
                )
            self._pieces.clear()
        return message


def has_too_many_values(pieces: Sequence[bytes]) -> bool:
    """Whether a body, in pieces, would take long to parse, if it is JSON."""
    if not _is_beyond(pieces):
        return False  # even if what looks like structure in a text is counted, too
    body = b"".join(pieces)
    if b"\0" in body:
        return True  # no JSON in UTF-8, where a quotation mark is one and nothing else
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_VALUES:
        return True  # texts are values, too, and take longer to skip than to count
    return _is_beyond([_STRING.sub(b"", body)])


def _is_beyond(pieces: Sequence[bytes]) -> bool:
    num_parts = sum(piece.count(sign) for piece in pieces for sign in (b"[", b"{", b":"))
    num_values = sum(piece.count(b",") for piece in pieces)
    return num_parts > MAX_PARTS or num_values > MAX_VALUES


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
