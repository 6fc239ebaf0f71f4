"""Records the server's HTTP calls: request ids, log lines, counts, times.

`RequestIdMiddleware` wraps every HTTP call. It uses the client's X-Request-ID if that is safe to
print, or else makes an id. Every answer and every log line of the call has this id. `Monitor`
counts: `http_generation` reports every generation to it, and `metrics` reads it. The engine's
numbers are not here; `metrics` asks the engine for them. Nothing here waits, raises because of a
client's input, or grows with the number of calls.

    a call is opened ──first token──> ... ──next token──> ... ──> ended
                   TTFT             ITL                        E2E
                                    └──── TPOT = their mean ────┘
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.request import Request, SequenceOutput
from quire.errors import DeadlineExceededError
from quire.observability.histogram import Histogram
from quire.observability.log import CallContext, begin_call, current_call, fields, get_logger
from quire.observability.spans import CallSpan, Spans
from quire.server.http.errors import CLIENT_GONE_STATUS, bug_response
from quire.server.telemetry.load_recorder import LoadRecorder
from quire.server.telemetry.span_attributes import (
    FIRST_TOKEN,
    request_attributes,
    result_attributes,
)

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
DEADLINE, DISCONNECT = "deadline", "disconnect"
FINISH_REASONS = (STOP, LENGTH, ABORT, ERROR, DEADLINE, DISCONNECT)
"""Reasons why a generation ends: the engine's finish reasons, DEADLINE and DISCONNECT."""

MAX_TENANTS = 200
OTHER_TENANTS = "other"
"""Tenants beyond MAX_TENANTS are counted under this name, since the keys of a long-running server
may change without bound."""


@dataclass(slots=True)
class TenantCounts:
    """Counts of one tenant."""

    num_generations: int = 0
    num_prompt_tokens: int = 0
    #: Prompt tokens that were served from the prefix cache.
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


class Monitor:
    """Counts since the server started. Only the event loop may read or change it."""

    def __init__(
        self,
        model_name: str = "",
        spans: Spans | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: LoadRecorder | None = None,
    ) -> None:
        """If `spans` is None, no spans are made. `clock` is in seconds. `recorder` must use the
        same clock."""
        self.model_name = model_name
        self.clock = clock
        #: Recorder of the load; None if nothing is recorded.
        self.recorder = recorder
        #: Answered calls by (method, route, status).
        self.http_calls: Counter[tuple[str, str, int]] = Counter()
        #: Errors by (status, code of the error).
        self.http_errors: Counter[tuple[int, str]] = Counter()
        #: Ended generations by (reason, tenant).
        self.finished: Counter[tuple[str, str]] = Counter()
        self.tenants: dict[str, TenantCounts] = {}
        #: Numbers of HTTP calls and generations that are open now.
        self.num_open_http_calls = 0
        self.num_open_generations = 0
        self.time_to_first_token_s = Histogram()
        self.inter_token_s = Histogram()
        self.time_per_token_s = Histogram()
        self.end_to_end_s = Histogram()
        self._spans = spans

    def begin_http(self) -> None:
        """Count an HTTP call that has arrived."""
        self.num_open_http_calls += 1

    def end_http(self, method: str, route: str, status: int, error_code: str | None) -> None:
        """Count an HTTP call that was answered. `route` is the route's path pattern, not the path
        that the client sent. `error_code` is None without an error."""
        self.num_open_http_calls -= 1
        self.http_calls[method, route, status] += 1
        if error_code is not None:
            self.http_errors[status, error_code] += 1

    def open_call(
        self,
        requests: Sequence[Request],
        tenant: str,
        request_id: str,
        attributes: Mapping[str, object] | None = None,
    ) -> "CallRecord":
        """Begin to record a call after the engine has accepted its generations, one per branch.

        `request_id` is the HTTP call's. `attributes` are added to the attributes that the span gets
        from the requests.
        """
        span = None
        if self._spans is not None:
            known = request_attributes(self.model_name, tenant, request_id, requests)
            known |= attributes or {}
            name = f"{known['gen_ai.operation.name']} {self.model_name}"
            span = self._spans.begin(name, known, current_call())
        label = tenant
        if tenant not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            label = OTHER_TENANTS
        counts = self.tenants.setdefault(label, TenantCounts())
        return CallRecord(self, requests, label, counts, span)

    def close(self) -> None:
        """Send the last spans and end the recording, which may take some seconds."""
        if self.recorder is not None:
            self.recorder.close()
        if self._spans is not None:
            self._spans.close()


class _TokenTimes:
    """Times of one generation's first and last token, and the number of tokens after the first."""

    __slots__ = ("first_s", "last_s", "num_later_tokens")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.num_later_tokens = 0


class CallRecord:
    """One call's generations while they run.

    Invariant: every generation is counted as finished exactly once, at the latest by `close`.
    """

    __slots__ = (
        "_began_s",
        "_call",
        "_clock",
        "_counts",
        "_monitor",
        "_open",
        "_reasons",
        "_recorded",
        "_span",
        "_tenant",
        "_unread",
        "num_generated_tokens",
        "num_prompt_tokens",
    )

    def __init__(
        self,
        monitor: Monitor,
        requests: Sequence[Request],
        tenant: str,
        counts: TenantCounts,
        span: CallSpan | None,
    ) -> None:
        """Call `Monitor.open_call` instead."""
        self._call = call = current_call()
        self._monitor = monitor
        self._clock = monitor.clock
        self._tenant = tenant
        self._counts = counts
        self._span = span
        self._open = {
            request.request_id: {branch: _TokenTimes() for branch in range(request.n)}
            for request in requests
        }
        self._unread = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self._reasons: Counter[str] = Counter()
        self._began_s = call.began_s if call is not None else monitor.clock()
        self.num_prompt_tokens = sum(self._unread.values())
        self.num_generated_tokens = 0
        recorder = monitor.recorder
        self._recorded = None if recorder is None else recorder.open_call(requests, self._began_s)
        num_branches = sum(map(len, self._open.values()))
        monitor.num_open_generations += num_branches
        counts.num_generations += num_branches
        if call is not None:
            call.generation_id = requests[0].request_id
            call.num_prompt_tokens = self.num_prompt_tokens

    def on_output(self, output: SequenceOutput) -> None:
        """Count an output that has just arrived from the engine."""
        branches = self._open.get(output.request_id)
        branch = None if branches is None else branches.get(output.branch_index)
        if branch is None:
            return  # a stop string has already ended the branch
        num_tokens = len(output.token_ids)
        if num_tokens:
            now_s = self._clock()
            if self._recorded is not None:
                self._recorded.on_output(output, now_s)
            if branch.first_s is None:
                self._begin(branch, output, now_s)
            else:
                pause_s = (now_s - branch.last_s) / num_tokens
                self._monitor.inter_token_s.observe(pause_s, num_tokens)
                branch.num_later_tokens += num_tokens
            branch.last_s = now_s
            self.num_generated_tokens += num_tokens
            self._counts.num_generated_tokens += num_tokens
        if output.finish_reason is not None:
            self._end(output.request_id, output.branch_index, output.finish_reason.value)

    def on_stop(self, request_id: str, branch_index: int) -> None:
        """Count a branch that a stop string has ended here, before the engine is notified."""
        self._end(request_id, branch_index, STOP)

    def on_wait_for_end(self) -> None:
        """Record that the call's answer is not streamed."""
        if self._recorded is not None:
            self._recorded.is_streamed = False

    def close(self, error: BaseException | None = None) -> None:
        """End the record; `error` has ended the generations that are open. May be called twice."""
        reason = _reason_for(error)
        for request_id, branches in list(self._open.items()):
            for branch_index in list(branches):
                self._end(request_id, branch_index, reason)
        self._open.clear()
        if self._call is not None:
            self._call.num_output_tokens = self.num_generated_tokens
        if self._span is not None:
            span, self._span = self._span, None
            failure = None if reason in (ABORT, DISCONNECT) else f"{type(error).__name__}: {error}"
            span.end(
                result_attributes(
                    self.num_prompt_tokens, self.num_generated_tokens, dict(self._reasons)
                ),
                failure,
            )

    def _begin(self, branch: _TokenTimes, output: SequenceOutput, now_s: float) -> None:
        branch.first_s = now_s
        self._monitor.time_to_first_token_s.observe(now_s - self._began_s)
        num_prompt_tokens = self._unread.pop(output.request_id, None)
        if num_prompt_tokens is None:
            return  # another branch of this request has already counted the prompt
        self._counts.num_prompt_tokens += num_prompt_tokens
        self._counts.num_cached_tokens += output.num_cached_tokens
        if self._span is not None and not self.num_generated_tokens:
            num_cached = output.num_cached_tokens
            self._span.add_event(FIRST_TOKEN, {"quire.num_cached_tokens": num_cached})

    def _end(self, request_id: str, branch_index: int, reason: str) -> None:
        branch = self._open.get(request_id, {}).pop(branch_index, None)
        if branch is None:
            return
        monitor = self._monitor
        monitor.num_open_generations -= 1
        monitor.finished[reason, self._tenant] += 1
        self._reasons[reason] += 1
        now_s = self._clock()
        monitor.end_to_end_s.observe(now_s - self._began_s)
        if self._recorded is not None:
            self._recorded.on_end(request_id, branch_index, reason, now_s)
        if branch.first_s is not None and branch.num_later_tokens:
            mean_s = (branch.last_s - branch.first_s) / branch.num_later_tokens
            monitor.time_per_token_s.observe(mean_s)


def _reason_for(error: BaseException | None) -> str:
    if error is None:
        return ABORT
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return DISCONNECT
    return DEADLINE if isinstance(error, DeadlineExceededError) else ERROR


MAX_ID_LENGTH = 128
MAX_PATH_LENGTH = 200

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
OTHER = "other"
"""Replaces unknown methods and paths in counts, since clients can send any number of them."""

CLIENT_GONE = "client_gone"

logger = get_logger("quire.access")
_bug_logger = get_logger(__name__)


class RequestIdMiddleware:
    """Assigns an id to every call, counts it and logs it.

    Sets request_id and arrival_s (by the monotonic clock) in scope["state"]. Reads the values that
    inner layers set there: tenant (with a `name`), and error_code of an error answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        monitor: Monitor,
        probes: Collection[str] = frozenset(),
        generating: Collection[str] = frozenset(),
    ) -> None:
        """`probes` are paths that monitoring calls every few seconds; their log lines have the
        level debug. `generating` are the paths whose refused calls a load recording includes."""
        self._app = app
        self._monitor = monitor
        self._probes = probes
        self._generating = generating

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = self._begin(scope)
        # OpenAI's clients read the first of these headers, Anthropic's clients the second.
        ids = [(name, call.request_id.encode()) for name in (b"x-request-id", b"request-id")]
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500  # starlette's outermost layer answers with 500
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
            request_id=_safe_client_id(headers.get(b"x-request-id", b""))
            or f"req-{uuid.uuid4().hex}",
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
            recorder = self._monitor.recorder
            is_ours = scope["path"] in self._generating and status != HTTPStatus.UNAUTHORIZED
            # Calls without a valid key are not recorded.
            if recorder and call.generation_id is None and is_ours:
                recorder.refuse(call.began_s, status, error_code)
        self._monitor.end_http(method, route, status, error_code)
        level = logging.DEBUG if route in self._probes else logging.INFO
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


def _safe_client_id(given: bytes) -> str:
    """A client's id if it is safe in a header and in a log line; otherwise ""."""
    if len(given) > MAX_ID_LENGTH or not all(0x21 <= byte <= 0x7E for byte in given):
        return ""
    return given.decode("ascii")


def _printable(text: str) -> str:
    """The text on one line of bounded length, since a decoded path may contain anything."""
    short = text[:MAX_PATH_LENGTH]
    return short if short.isprintable() else repr(short)[1:-1]


class BugReporter:
    """Logs exceptions that have no handler, and answers with status 500.

    It is the innermost of quire's middlewares, so its answers pass through all the others.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_some(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_some)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise  # the HTTP server logs it and closes the connection
            _bug_logger.error("a bug at %s %r", scope["method"], scope["path"], exc_info=error)
            await bug_response(scope, error)(scope, receive, send)
