"""uvicorn's HTTP protocol on httptools, with fixes for cases that its h11 protocol handles.

uvicorn's class has no bound on a head, adds trailers to the headers, and loses the body of a
request that offers an upgrade (as Java's client always does). It answers malformed input in the
middle of another answer. It sends chunked encoding to HTTP/1.0 clients, which don't decode it. Of
several requests on one connection it marks only the last as disconnected. Imported by `connection`
if httptools is installed.
"""

from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.http.guard import MAX_HEAD_BYTES, RequestHeadError, head_too_long
from quire.server.http.h11_protocol import NOT_HTTP, Refuse


class HttpTools(HttpToolsProtocol):
    """uvicorn's protocol on httptools, the parser in C. Its owner sets `refuse` and `on_answered`
    before the first data.

    Invariants: input after a malformed request is not read; `_unanswered` has the requests with a
    complete head and an incomplete answer.
    """

    refuse: Refuse
    on_answered: Callable[[], None]

    def __init__(self, **from_uvicorn: Any) -> None:
        super().__init__(**from_uvicorn)
        self._is_in_head = False
        self._num_head_bytes = 0  # bytes of the head, without the piece in which it begins
        self._upgrade: list[bytes] | None = None  # the head of a request that offers an upgrade
        self._error: RequestHeadError | None = None
        self._unanswered: deque[Any] = deque()  # uvicorn's requests; the first is being answered

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._unset_keepalive_if_required()
        was_in_head = self._is_in_head
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._fail(RequestHeadError(HTTPStatus.BAD_REQUEST, NOT_HTTP))
            return
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._fail(head_too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # otherwise a trailer, which must not count as a checked header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade = self._head_without_upgrade()
        else:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                cycle: Any = self.cycle
                cycle.send = _without_chunks(cycle)
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self._upgrade is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self.on_answered()
        if self._error is not None and not self._unanswered:
            self.refuse(self._error)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        """Parse the data. Raises HttpParserError. httptools can't ignore an offered upgrade, so the
        head of such a request is parsed again without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._upgrade is None:  # after CONNECT the data is not HTTP
                    self.cycle.keep_alive = False
                    return
                data = b"".join([*self._upgrade, data[upgrade.args[0] :]])
                self._upgrade = None
                self.parser = httptools.HttpRequestParser(self)
                if hasattr(self.parser, "set_dangerous_leniencies"):  # as uvicorn sets it
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> list[bytes]:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() != b"upgrade")
            if name != b"upgrade" and (name != b"connection" or value):
                lines += [name, b": ", value, b"\r\n"]
        return [*lines, b"\r\n"]

    def _fail(self, error: RequestHeadError) -> None:
        """Refuse malformed input, once the answers to earlier requests are complete."""
        self._error = error
        requests = self._unanswered
        if not requests:
            self.refuse(error)
        elif self._is_in_head or not requests[-1].more_body:
            return  # `on_response_complete` refuses the input after these answers
        elif len(requests) > 1:  # the last waiting request has a broken body: drop it
            requests.pop()
            self.pipeline.popleft()
        elif requests[0].response_started:
            self.transport.close()
        else:
            self.refuse(error)


def _without_chunks(cycle: Any) -> Send:
    """The `send` of an HTTP/1.0 request, without chunked encoding. An answer without an announced
    length ends with the connection (RFC 9112, section 6.3)."""
    send_framed, is_framed = cycle.send, True

    async def send(message: Message) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            is_framed = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not is_framed:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif not is_framed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)

    return send
