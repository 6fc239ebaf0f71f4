"""Middlewares that check every HTTP call first: its head, its key, its body's size.

`app` installs three, listed here in the order of a call. `RequestHead` refuses a head that is
ambiguous or asks for an unsupported feature; the HTTP parsers don't check all of this. Otherwise a
proxy and this server could disagree about the end of a request (request smuggling).

`AccessGuard` refuses a call without a valid key before its body is read or its route is looked up,
so existing and unknown paths get the same answer. It puts the call's tenant into the call's state,
and whether the call is the operator's. Only the operator may see numbers of the whole server, since
they change with the calls of other tenants; docs/security.md has the table.

`BodyLimit` bounds a body's length, the time of its upload, and the bytes of all bodies together.
`json_body` bounds the content.
"""

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import (
    AuthenticationError,
    BodyTooLongError,
    ConfigurationError,
    OperatorOnlyError,
    QuireError,
    RequestTimeoutError,
    TenantBusyError,
    UploadsFullError,
)
from quire.server.http.body_budget import BodyBudget, Upload
from quire.server.http.errors import error_response
from quire.server.http.host_rule import HostRule
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import NO_TENANT, Tenant

MAX_HEAD_BYTES = 32 << 10
"""Maximum bytes of a request's target and headers together; more are answered with 431."""

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0

MIN_BYTES_PER_S = 16 << 10
"""Minimum upload speed. A client that sends at least this fast never runs out of time."""

_LENGTH_DIGITS = 20
"""A Content-Length with more digits exceeds all bounds, whatever the digits are."""

_BYTES_BESIDE_A_HEADER = 4
"""Bytes of a header line besides name and value: the colon, a space, and the end of the line."""

_SLASHES = re.compile("//+")

_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
"""The scheme and host before the path in an absolute target, as clients send it to proxies. HTTP
requires servers to accept it, too."""

CODES = {
    HTTPStatus.BAD_REQUEST: "bad_request_head",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_content_encoding",
    HTTPStatus.MISDIRECTED_REQUEST: "host_not_allowed",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "head_too_long",
    HTTPStatus.NOT_IMPLEMENTED: "unsupported_transfer_encoding",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "http_version_not_supported",
}
"""Codes of the errors of this module, by status."""


class RequestHeadError(QuireError):
    """A request that is not valid HTTP or can't be answered. Its connection is closed."""

    may_be_retried = False
    ends_connection = True

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.http_status = status.value
        self.code = CODES[status]


class RequestHead:
    """Refuses requests with an ambiguous head, and normalizes paths.

    A target with a scheme and a host is replaced by its path. Repeated slashes in a path become
    one, since some clients join a base URL that ends with a slash to a path that begins with one.

    A path that would become an operator's is not changed: `//metrics` keeps its slashes and gets a
    404. Otherwise it would bypass a proxy that blocks exactly the path `/metrics`.
    """

    def __init__(
        self,
        app: ASGIApp,
        name_prefixes: Iterable[str] = (),
        operator_paths: Sequence[str] = (),
        hosts: HostRule | None = None,
    ) -> None:
        """A path that begins with one of `name_prefixes` ends with a model's name. The name keeps
        its slashes, since it may be an absolute path of a folder. `operator_paths`: see
        `AccessGuard`."""
        self._app = app
        self._names = {each: re.compile(each.replace("/", "/+")) for each in name_prefixes}
        self._operator_paths = operator_paths
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_head(scope)
                if self._hosts is not None:
                    _check_name(scope["headers"], self._hosts)
            except RequestHeadError as error:
                await error_response(scope, error)(scope, receive, send)
                return
            if "//" in scope["path"]:
                scope["path"] = self._joined(scope["path"])
        await self._app(scope, receive, send)

    def _joined(self, path: str) -> str:
        """The path with each run of slashes replaced by one slash."""
        for prefix, pattern in self._names.items():
            if found := pattern.match(path):
                # The first slash ends the prefix; further slashes belong to the name.
                start = found.end() - len(found[0]) + len(found[0].rstrip("/")) + 1
                return prefix + path[start:]
        joined = _SLASHES.sub("/", path)
        return path if is_below(joined, self._operator_paths) else joined


def head_too_long() -> RequestHeadError:
    """The error for a head of more than MAX_HEAD_BYTES."""
    return RequestHeadError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the request's target and headers have more than {MAX_HEAD_BYTES} bytes; send fewer",
    )


def check_head(scope: Scope) -> None:
    """Check a request's head; replace an absolute target by its path. Raises RequestHeadError."""
    headers = scope["headers"]
    num_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    num_bytes += sum(len(n) + len(v) + _BYTES_BESIDE_A_HEADER for n, v in headers)
    if num_bytes > MAX_HEAD_BYTES:
        raise head_too_long()
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
    """Refuse a second Host header, and HTTP/1.1 without one (RFC 9112, section 3.2)."""
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _bad(f"the request has {len(hosts)} Host headers, but must have one")


def _check_name(headers: Iterable[tuple[bytes, bytes]], hosts: HostRule) -> None:
    """Refuse a Host under which this server is not called (RFC 9110, section 15.5.20)."""
    for host in _values(headers, b"host"):
        if not hosts.allows(name := host.decode("latin-1")):
            raise RequestHeadError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the Host is {name!r:.80}, which this server does not answer to; call it by"
                " localhost or an IP address, or start it with --allowed-hosts",
            )


def _check_framing(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """Refuse two headers that determine where the body ends (RFC 9112, section 6)."""
    codings = _values(headers, b"transfer-encoding")
    if not codings:
        return
    if _values(headers, b"content-length"):
        raise _bad("the request has both Content-Length and Transfer-Encoding; send one of them")
    if version == "1.0":
        raise _bad("the request is of HTTP/1.0, which has no Transfer-Encoding")
    if [coding.strip().lower() for coding in codings] != [b"chunked"]:
        sent = b", ".join(codings).decode("latin-1")
        raise RequestHeadError(
            HTTPStatus.NOT_IMPLEMENTED,
            f"the Transfer-Encoding is {sent!r:.80}, but only chunked is understood",
        )


def _check_content(encodings: list[bytes]) -> None:
    sent = b", ".join(encodings).strip().decode("latin-1")
    if sent.lower() not in ("", "identity"):
        raise RequestHeadError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the Content-Encoding is {sent!r:.80}, but bodies must be sent as they are; leave the"
            " header out",
        )


def _check_target(scope: Scope) -> None:
    """Replace an absolute target by its path; refuse other forms (RFC 9112, section 3.2)."""
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


OPERATOR = Tenant("operator")
KEY_HEADERS = (b"authorization", b"x-api-key")

ANY_ORIGIN = "*"

_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """The settings of this module's middlewares.

    Raises ConfigurationError for an origin that no browser would send.
    """

    #: The valid API keys; None means that calls need no key.
    keys: ApiKeys | None = None
    #: Origins of the web pages that may call, or "*" for any.
    allowed_origins: tuple[str, ...] = ()
    #: The names under which calls may reach the server; None for any.
    hosts: HostRule | None = None
    #: The bounds of bodies; see `BodyLimit`.
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    bodies: BodyBudget = field(default_factory=BodyBudget)

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ConfigurationError(
                    f"allowed_origins has {origin!r}, but an origin is http(s)://HOST or "
                    "http(s)://HOST:PORT, in lower case and without a path or a slash at its end; "
                    "or * for any"
                )
        if self.max_body_bytes < 1:
            raise ConfigurationError(
                f"max_body_bytes is {self.max_body_bytes}, but must be at least 1"
            )

    @property
    def is_guarded(self) -> bool:
        return self.keys is not None

    @property
    def has_operator(self) -> bool:
        """Whether a call could be the operator's: the server has no keys, or the tenant `operator`
        has a key."""
        return self.keys is None or OPERATOR in self.keys.tenants


class AccessGuard:
    """Answers 401 to calls without a valid key, and 403 to clients' calls of the operator's paths.

    A call is the operator's if its key belongs to the tenant `operator`. On a server without keys,
    a call is the operator's if it has no key. A call with a key then counts as a client's, since a
    gateway in front of the server may check clients' keys and pass them on.

    Sets `is_operator` and `tenant` in the state of accepted calls. An accepted call without a key,
    to an open path, gets no `tenant`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        open_paths: Collection[str] = frozenset(),
        operator_paths: Sequence[str] = (),
    ) -> None:
        """If `keys` is None, no call needs a key, and all clients are one tenant. `open_paths` need
        no key. Only the operator may call `operator_paths` and the paths below them."""
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._operator_paths = operator_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, path, state = scope["headers"], scope["path"], scope.setdefault("state", {})
        presented = list(presented_keys(headers))
        tenant = NO_TENANT if self._keys is None else self._keys.tenant_of(presented)
        if self._keys is None:
            state["is_operator"] = not brings_key(headers)
        else:
            state["is_operator"] = tenant == OPERATOR
        if tenant is not None:
            state["tenant"] = tenant
        elif path not in self._open_paths:
            await _refuse_key(scope, receive, send, has_key=bool(presented))
            return
        if is_below(path, self._operator_paths) and not state["is_operator"]:
            error = _for_the_operator(path, has_keys=self._keys is not None)
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Whether `path` is one of `roots` or begins with one of them and a slash."""
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def brings_key(headers: Headers) -> bool:
    """Whether a header for keys is not empty, even if its value is malformed."""
    return any(name in KEY_HEADERS and value.strip() for name, value in headers)


def presented_keys(headers: Headers) -> Iterator[bytes]:
    """The keys in `Authorization: Bearer KEY` and `X-Api-Key: KEY`; at most one per header."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in KEY_HEADERS:
            first.setdefault(name, value.strip())
    scheme, _, key = first.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        yield key.strip()
    if first.get(b"x-api-key"):
        yield first[b"x-api-key"]


def _for_the_operator(path: str, *, has_keys: bool) -> OperatorOnlyError:
    whose = f"{path:.80} shows what the whole server does, so it is for the operator alone: "
    if has_keys:
        return OperatorOnlyError(
            f"{whose}ask with a key that is named operator (operator:KEY among the server's keys)"
        )
    return OperatorOnlyError(
        f"{whose}this server has no keys, so a call that brings one counts as a tenant's; ask"
        " without a key"
    )


async def _refuse_key(scope: Scope, receive: Receive, send: Send, *, has_key: bool) -> None:
    if scope["type"] == "websocket":  # closing before the handshake answers 403
        await send({"type": "websocket.close", "code": 1008})
        return
    what = "the API key is not one of this server's" if has_key else "there is no API key"
    error = AuthenticationError(f"{what}; send a valid one as `Authorization: Bearer KEY`")
    await error_response(scope, error)(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too long, too slow, or exceed the budget of all bodies together.

    A body whose Content-Length is too high is refused before it is received, any other body while
    it is received.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int = MAX_BODY_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
        budget: BodyBudget | None = None,
        upload_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """A body must be complete within `timeout_s` plus one second per MIN_BYTES_PER_S bytes. The
        same time limit applies to each section of PROGRESS_BYTES, from the end of the previous one.
        `budget` bounds all bodies together; None means no bound. `upload_bytes` has the bounds of
        paths that write bodies to disk as they arrive, which the budget leaves out."""
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._budget = BodyBudget() if budget is None else budget
        self._upload_bytes = upload_bytes or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _announced_bytes(scope)
        upload_bytes = self._upload_bytes.get(scope.get("path", ""))
        max_bytes = self._max_bytes if upload_bytes is None else upload_bytes
        if announced > max_bytes:
            await error_response(scope, _body_too_long(max_bytes))(scope, receive, send)
            return
        budget = self._budget if upload_bytes is None else BodyBudget()
        upload = budget.open(scope.get("state", {}).get("tenant", NO_TENANT).name)
        try:
            try:
                upload.expect(announced)
            except (TenantBusyError, UploadsFullError) as error:
                await error_response(scope, error)(scope, receive, send)
                return
            body = _Body(receive, max_bytes, self._timeout_s, upload)
            await self._app(scope, body.receive, send)
        finally:
            upload.close()


class _Body:
    """A `receive` that enforces the limits until the body is complete, and then passes messages
    on."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, upload: Upload) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._timeout_s = timeout_s
        self._upload = upload
        self._began_s = asyncio.get_running_loop().time()
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises RequestTimeoutError, BodyTooLongError, TenantBusyError, UploadsFullError."""
        if self._is_whole:
            return await self._receive()
        loop, upload = asyncio.get_running_loop(), self._upload
        # Both the whole body and its current section of PROGRESS_BYTES must be fast enough.
        of_all_s = self._began_s + self._num_bytes / MIN_BYTES_PER_S
        of_last_s = upload.progress_s + upload.num_since_progress / MIN_BYTES_PER_S
        until_s = min(of_all_s, of_last_s) + self._timeout_s
        try:
            async with asyncio.timeout_at(until_s) as timeout:
                upload.on_cut = lambda: _expire(timeout)
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"after {loop.time() - self._began_s:.0f} seconds only {self._num_bytes} bytes of "
                "the body have come; send it faster"
            ) from None
        finally:
            upload.on_cut = None
        # Count the bytes that have arrived, and refuse a body that is too long or has no room.
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise _body_too_long(self._max_bytes)
        upload.count_bytes(num_bytes)
        if not message.get("more_body", False):
            self._is_whole = True
            upload.end()
        return message


def _expire(timeout: asyncio.Timeout) -> None:
    """Make `timeout` expire now, unless it already has."""
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


def _announced_bytes(scope: Scope) -> int:
    """The Content-Length; 0 if there is none, as in chunked encoding."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            # Strip leading zeros, since parsers accept any number and int() at most 4,300 digits.
            return int(value.lstrip(b"0")[:_LENGTH_DIGITS] or 0) if value.isdigit() else 0
    return 0


def _body_too_long(max_bytes: int) -> BodyTooLongError:
    return BodyTooLongError(f"the body is longer than {max_bytes} bytes; send less in one request")
