"""uvicorn's HTTP protocol on h11, with quire's errors for malformed requests.

A malformed request gets an error in quire's JSON form, and never in the middle of another answer.
`connection` makes one protocol for each connection and sets its `refuse`. If httptools is
installed, `httptools_protocol` is used instead.
"""

import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.http.guard import MAX_HEAD_BYTES, RequestHeadError, head_too_long

Refuse = Callable[[RequestHeadError], None]
"""Answers with an error and then ends the connection."""

NOT_HTTP = "the request is not valid HTTP/1.1"


class H11(H11Protocol):
    """uvicorn's protocol on h11, the parser in Python. Its owner sets `refuse` and `on_answered`
    before the first data."""

    refuse: Refuse
    on_answered: Callable[[], None]

    def __init__(self, **from_uvicorn: Any) -> None:
        super().__init__(**from_uvicorn)
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.on_answered()

    def send_400_response(self, msg: str) -> None:
        """Refuse the request with the status in h11's exception. uvicorn calls this while it
        handles the exception."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun
            return
        hint = getattr(sys.exception(), "error_status_hint", HTTPStatus.BAD_REQUEST)
        if hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self.refuse(head_too_long())
        elif hint == HTTPStatus.NOT_IMPLEMENTED:
            self.refuse(
                RequestHeadError(
                    HTTPStatus.NOT_IMPLEMENTED,
                    "the Transfer-Encoding is unknown; only chunked is understood",
                )
            )
        else:
            self.refuse(RequestHeadError(HTTPStatus.BAD_REQUEST, NOT_HTTP))
