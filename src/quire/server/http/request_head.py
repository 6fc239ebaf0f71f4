"""Refuses requests whose heads could be read in two ways, or ask for what is not done here.

The HTTP parsers leave some of it to their callers, each something else; behind a proxy that reads
such a head otherwise, the end of one request could be the beginning of another. Set up by `app`,
inside the request's id and outside all else. Reads no body and knows no routes.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.server.http.errors import error_response

MAX_HEAD_BYTES = 32 << 10
"""Of a request's target and headers, beyond which the answer is 431."""

_BYTES_BESIDE_A_HEADER = 4
"""The colon, a space, and the end of the line."""

_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
"""What stands before the path in a target for proxies, which every server has to understand."""

CODES = {
    HTTPStatus.BAD_REQUEST: "bad_request_head",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_content_encoding",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "head_too_long",
    HTTPStatus.NOT_IMPLEMENTED: "unsupported_transfer_encoding",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "http_version_not_supported",
}
"""Of the errors here, by their status."""


class RequestHeadError(QuireError):
    """A request that is not understood as HTTP, or can't be answered. Its connection is closed."""

    may_be_retried = False
    ends_connection = True

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.http_status = status.value
        self.code = CODES[status]


class RequestHead:
    """Lets through requests with a head that has one meaning; the path of a target with a scheme
    and a host becomes the path of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_head(scope)
            except RequestHeadError as error:
                await error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def too_long() -> RequestHeadError:
    """The error for a head of more than MAX_HEAD_BYTES."""
    return RequestHeadError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the request's target and headers have more than {MAX_HEAD_BYTES} bytes; send fewer",
    )


def check_head(scope: Scope) -> None:
    """Raises RequestHeadError; sets the path of a target in its absolute form."""
    headers = scope["headers"]
    num_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    num_bytes += sum(len(n) + len(v) + _BYTES_BESIDE_A_HEADER for n, v in headers)
    if num_bytes > MAX_HEAD_BYTES:
        raise too_long()
    version = scope.get("http_version", "1.1")
    if version not in ("1.0", "1.1"):
        raise RequestHeadError(
            HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
            f"the request is of HTTP/{version}, but this server speaks HTTP/1.1",
        )
    _check_host(_values(headers, b"host"), version)
    _check_framing(headers, version)
    _check_content(_values(headers, b"content-encoding"))
    _check_target(scope)


def _check_host(hosts: list[bytes], version: str) -> None:
    """RFC 9112, section 3.2."""
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _bad(f"the request has {len(hosts)} Host headers, but must have one")


def _check_framing(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """RFC 9112, section 6: where the body ends must be said in one way."""
    codings = _values(headers, b"transfer-encoding")
    if not codings:
        return
    if _values(headers, b"content-length"):
        raise _bad("the request has both Content-Length and Transfer-Encoding; send one of them")
    if version == "1.0":
        raise _bad("the request is of HTTP/1.0, which has no Transfer-Encoding")
    if [coding.strip().lower() for coding in codings] != [b"chunked"]:
        told = b", ".join(codings).decode("latin-1")
        raise RequestHeadError(
            HTTPStatus.NOT_IMPLEMENTED,
            f"the Transfer-Encoding is {told!r:.80}, but only chunked is understood",
        )


def _check_content(encodings: list[bytes]) -> None:
    told = b", ".join(encodings).strip().decode("latin-1")
    if told.lower() not in ("", "identity"):
        raise RequestHeadError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the Content-Encoding is {told!r:.80}, but bodies must be sent as they are; leave the"
            " header out",
        )


def _check_target(scope: Scope) -> None:
    """RFC 9112, section 3.2: a path, or one with a scheme and a host before it."""
    path: str = scope["path"]
    if path.startswith("/") or (path == "*" and scope["method"] == "OPTIONS"):
        return
    found = _ABSOLUTE.match(raw := scope["raw_path"])
    if found is None or scope["method"] == "CONNECT":
        raise _bad(f"the request's target is {path!r:.80}, but must be a path, such as /v1/models")
    scope["raw_path"] = raw[found.end() :] or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for each, value in headers if each == name]


def _bad(message: str) -> RequestHeadError:
    return RequestHeadError(HTTPStatus.BAD_REQUEST, message)
