"""Lets in who has a key, before anything else is looked at.

A call without a valid key is answered before its body is read or a route is looked for, so that
nothing but /health can be told apart from outside. Knows the keys through `keys.ApiKeys` and puts
the tenant into the call's state, where `tenancy` finds it, and whether the caller is the operator,
who alone may see numbers of the whole server: they move with what others do, and would tell a
tenant so. docs/security.md has the table of who may see what. Set up by `app`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import AuthenticationError, ConfigurationError, OperatorOnlyError
from quire.server.http.body_limit import BODY_TIMEOUT_S, MAX_BODY_BYTES
from quire.server.http.errors import error_response
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import NO_TENANT, Tenant

OPEN_PATHS = frozenset({"/health"})
"""Served without a key, and then without details: whoever restarts the server has none."""

OPERATOR = Tenant("operator")
OPERATOR_PATHS = ("/memory", "/metrics")
"""Where the whole server's numbers are: with what is below them for the operator alone."""

KEY_HEADERS = (b"authorization", b"x-api-key")

ANY_ORIGIN = "*"

_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may call, from where, with how much.

    keys: None lets everybody in. allowed_origins: of web pages that may call, "*" for any; none by
    default. max_body_bytes, body_timeout_s: see `body_limit`.

    Raises ConfigurationError for an origin that no browser would send.
    """

    keys: ApiKeys | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S

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
        """Whether anybody can be the operator now."""
        return self.keys is None or OPERATOR in self.keys.tenants


class AccessGuard:
    """Answers 401 to calls without a valid key, where there are keys at all, and 403 to those that
    ask for what is the operator's and are not the operator's.

    The operator is who has a key of the tenant called `operator`. Where there are no keys it is who
    brings none: behind a gateway that checks keys and passes them on, those with one are clients.

    Sets in the state of the calls that it lets in: `is_operator`, and `tenant`, which a call that
    has no key and asks for an open path has not.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        """keys: None lets everybody in, as one tenant."""
        self._app = app
        self._keys = keys

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
        elif path not in OPEN_PATHS:
            await _refuse(scope, receive, send, has_key=bool(presented))
            return
        if _is_operators(path) and not state["is_operator"]:
            error = _for_the_operator(path, has_keys=self._keys is not None)
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def brings_key(headers: Headers) -> bool:
    """Whether there is anything in a header for keys, in whatever form."""
    return any(name in KEY_HEADERS and value.strip() for name, value in headers)


def presented_keys(headers: Headers) -> Iterator[bytes]:
    """The key in `Authorization: Bearer KEY` and that in `X-Api-Key: KEY`; one of each at most."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in KEY_HEADERS:
            first.setdefault(name, value.strip())
    scheme, _, key = first.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        yield key.strip()
    if first.get(b"x-api-key"):
        yield first[b"x-api-key"]


def _is_operators(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in OPERATOR_PATHS)


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


async def _refuse(scope: Scope, receive: Receive, send: Send, *, has_key: bool) -> None:
    if scope["type"] == "websocket":  # none is served; before it is accepted, this is a 403
        await send({"type": "websocket.close", "code": 1008})
        return
    what = "the API key is not one of this server's" if has_key else "there is no API key"
    error = AuthenticationError(f"{what}; send a valid one as `Authorization: Bearer KEY`")
    await error_response(scope, error)(scope, receive, send)
