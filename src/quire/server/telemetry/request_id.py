"""The outermost layer around every HTTP call: its request id, its count, and its line in the log.

A client's own X-Request-ID is kept where it is sane, else one is made; either way it comes back
with the answer, whatever the answer is, and stands in every log line of the call. Knows no API
family. Installed by `app`; tells `monitor`.
"""

import logging
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observability.log import CallContext, begin_call, fields, get_logger
from quire.server.telemetry.monitor import Monitor

MAX_ID_LENGTH = 128
MAX_PATH_LENGTH = 200

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
PROBES = frozenset(("/health", "/ready", "/metrics"))
"""Asked every few seconds by machines: their access lines are of level debug."""

OTHER = "other"
"""Stands for methods and paths that are not ours: clients can invent any number of them."""

CLIENT_GONE_STATUS = 499
"""nginx's: the client went away before there was a status. Nobody receives it."""
CLIENT_GONE = "client_gone"

logger = get_logger("quire.access")


class RequestIdMiddleware:
    """Wraps `app`. Leaves in scope["state"]: request_id, and arrival_s on the monotonic clock.

    Reads there what others left: tenant (something with a `name`), error_code (of an error answer).
    """

    def __init__(self, app: ASGIApp, monitor: Monitor) -> None:
        self._app = app
        self._monitor = monitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = self._begin(scope)
        header = (b"x-request-id", call.request_id.encode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500  # starlette answers, outside of all that an application adds
            raise
        finally:
            self._end(scope, call, status or CLIENT_GONE_STATUS)

    def _begin(self, scope: Scope) -> CallContext:
        headers = {
            name: value
            for name, value in scope["headers"]
            if name in (b"x-request-id", b"traceparent", b"tracestate")
        }
        call = CallContext(
            request_id=_sane(headers.get(b"x-request-id", b"")) or f"req-{uuid.uuid4().hex}",
            began_s=self._monitor.clock(),
            began_at_ns=time.time_ns(),
            traceparent=headers.get(b"traceparent", b"").decode("latin-1"),
            tracestate=headers.get(b"tracestate", b"").decode("latin-1"),
        )
        state = scope.setdefault("state", {})
        state["request_id"] = call.request_id
        state["arrival_s"] = call.began_s
        begin_call(call)
        self._monitor.begin_http()
        return call

    def _end(self, scope: Scope, call: CallContext, status: int) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        route = getattr(scope.get("route"), "path_format", OTHER)
        error_code = None
        if status >= 400:
            unnamed = CLIENT_GONE if status == CLIENT_GONE_STATUS else OTHER
            error_code = scope["state"].get("error_code") or unnamed
        self._monitor.end_http(method, route, status, error_code)
        level = logging.DEBUG if route in PROBES else logging.INFO
        if logger.isEnabledFor(level):
            elapsed_ms = 1e3 * (self._monitor.clock() - call.began_s)
            _log_access(level, scope, call, status, elapsed_ms)


def _log_access(
    level: int, scope: Scope, call: CallContext, status: int, elapsed_ms: float
) -> None:
    details: dict[str, object] = {}
    if call.generation_id is not None:
        details |= {
            "generation_id": call.generation_id,
            "num_prompt_tokens": call.num_prompt_tokens,
            "num_output_tokens": call.num_output_tokens,
        }
    tenant = getattr(scope["state"].get("tenant"), "name", "")
    if tenant:
        details["tenant"] = tenant
    method, path = _printable(scope["method"]), _printable(scope["path"])
    logger.log(
        level,
        "%s %s %d %.1f ms%s",
        method,
        path,
        status,
        elapsed_ms,
        "".join(f" {name}={value}" for name, value in details.items()),
        extra=fields(method=method, path=path, status=status, ms=round(elapsed_ms, 3), **details),
    )


def _sane(given: bytes) -> str:
    """A client's id as it may stand in a header and in a log line; "" for one that may not."""
    if len(given) > MAX_ID_LENGTH or not all(0x21 <= byte <= 0x7E for byte in given):
        return ""
    return given.decode("ascii")


def _printable(text: str) -> str:
    """On one line, of bounded length: a path can have anything in it, once it is decoded."""
    short = text[:MAX_PATH_LENGTH]
    return short if short.isprintable() else repr(short)[1:-1]
