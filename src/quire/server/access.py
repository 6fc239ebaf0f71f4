"""Lets in who has a key, before anything else is looked at.

A call without a valid key is answered before its body is read or a route is looked for, so that
nothing but /health can be told apart from outside. Knows the keys through `keys.ApiKeys` and puts
the tenant into the call's state, where `tenancy` finds it. Set up by `app`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import AuthenticationError, ConfigurationError, OperatorOnlyError
from quire.server.body_limit import BODY_TIMEOUT_S, MAX_BODY_BYTES
from quire.server.errors import error_response
from quire.server.keys import ApiKeys
from quire.server.tenants import NO_TENANT, Tenant

OPEN_PATHS = frozenset({"/health"})
"""Served without a key, and then without details: whoever restarts the server has none."""

OPERATOR = Tenant("operator")
OPERATOR_PATHS = ("/memory", "/metrics")
"""Where tenants are named: with what is below them for the operator alone, if there is a key for
one."""

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


class AccessGuard:
    """Answers 401 to calls without a valid key, where there are keys at all, and 403 to tenants
    that ask for what is the operator's.

    Sets `tenant` in the state of the calls that it lets in; an open path without a key has none.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        """keys: None lets everybody in, as one tenant."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            presented = list(presented_keys(scope["headers"]))
            tenant = NO_TENANT if self._keys is None else self._keys.tenant_of(presented)
            if tenant is not None:
                scope.setdefault("state", {})["tenant"] = tenant
                if self._is_operators(scope["path"]) and tenant != OPERATOR:
                    error = OperatorOnlyError(f"{scope['path']:.80} is for the operator's key")
                    await error_response(scope, error)(scope, receive, send)
                    return
            elif scope["path"] not in OPEN_PATHS:
                await _refuse(scope, receive, send, has_key=bool(presented))
                return
        await self._app(scope, receive, send)

    def _is_operators(self, path: str) -> bool:
        if self._keys is None or OPERATOR not in self._keys.tenants:
            return False
        return any(path == one or path.startswith(f"{one}/") for one in OPERATOR_PATHS)


def presented_keys(headers: Headers) -> Iterator[bytes]:
    """The key in `Authorization: Bearer KEY` and that in `X-Api-Key: KEY`; one of each at most."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"authorization", b"x-api-key"):
            first.setdefault(name, value.strip())
    scheme, _, key = first.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        yield key.strip()
    if first.get(b"x-api-key"):
        yield first[b"x-api-key"]


async def _refuse(scope: Scope, receive: Receive, send: Send, *, has_key: bool) -> None:
    if scope["type"] == "websocket":  # none is served; before it is accepted, this is a 403
        await send({"type": "websocket.close", "code": 1008})
        return
    what = "the API key is not one of this server's" if has_key else "there is no API key"
    error = AuthenticationError(f"{what}; send a valid one as `Authorization: Bearer KEY`")
    await error_response(scope, error)(scope, receive, send)
