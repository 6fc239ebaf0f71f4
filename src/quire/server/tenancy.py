"""Whose request it is: the identity of the API key that came with it.

Keys are not checked here. Prefixes in the cache are shared, and service is shared fairly, between
requests with the same key; requests without one are of one tenant.
"""

import hashlib

from fastapi import Request as HTTPRequest

from quire.engine.inputs import RequestOptions


def tenant_of(http: HTTPRequest) -> str:
    """A name for the request's API key that does not betray it; "" without a key."""
    key = http.headers.get("authorization", "")
    if not key:
        return ""
    return f"key-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


def options_of(http: HTTPRequest, priority: int, cache_salt: str | None) -> RequestOptions:
    """Raises InvalidRequestError."""
    return RequestOptions(priority=priority, tenant=tenant_of(http), cache_salt=cache_salt or "")
