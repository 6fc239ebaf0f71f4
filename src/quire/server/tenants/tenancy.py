"""Whose request it is, what of the cache it may share, and when it must have ended.

Prefixes in the cache are shared within a tenant only, and there between requests with the same
salt. Where the server has no keys all clients are one tenant, without quotas of their own; but what
a client sent as its key, though nobody has checked it, still parts its prefixes from those of
others, since behind a gateway that checks keys it tells clients apart. Called by the API families
and by `generation`.
"""

import hashlib
from dataclasses import replace
from typing import Protocol, cast

from fastapi import Request as HTTPRequest

from quire.engine_client.inputs import RequestOptions
from quire.server.service import service_of
from quire.server.tenants.tenants import NO_TENANT, Tenant


class Placed(Protocol):
    """What a body says of its place among others."""

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def deadline_s(self) -> float | None: ...


def tenant_of(http: HTTPRequest) -> Tenant:
    """Whom `access` found the call to be from."""
    return cast(Tenant, getattr(http.state, "tenant", NO_TENANT))


def options_of(http: HTTPRequest, body: Placed) -> RequestOptions:
    """Raises InvalidRequestError."""
    deadline_s = body.deadline_s
    options = RequestOptions(
        priority=body.priority,
        tenant=tenant_of(http).name,
        cache_salt=body.cache_salt or "",
        deadline_s=service_of(http).default_deadline_s if deadline_s is None else deadline_s,
    )
    unchecked = [http.headers.get(name, "") for name in ("authorization", "x-api-key")]
    if options.tenant or not any(unchecked):
        return options
    return replace(options, cache_salt=_digest(*unchecked, options.cache_salt))


def _digest(*parts: str) -> str:
    """The same for the same parts only."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
