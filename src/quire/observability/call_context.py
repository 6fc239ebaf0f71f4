"""Which HTTP call the running code serves: for log lines, access lines and spans.

`server.request_id` begins a call; whatever runs for it, in its tasks and threads, finds it through
a context variable, so that nothing in between has to pass it on. Knows no HTTP and no asyncio.
"""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class CallContext:
    """One call, from its first header to its last byte.

    request_id: the client's own, or one made for it. traceparent, tracestate: what it said of the
        trace that it belongs to (W3C Trace Context); "" where it said nothing.
    began_s: on the monotonic clock; began_at_ns: since the epoch.
    generation_id, num_prompt_tokens, num_output_tokens: filled in by the monitor; None where
        nothing was generated.
    """

    request_id: str
    began_s: float = 0.0
    began_at_ns: int = 0
    traceparent: str = ""
    tracestate: str = ""
    generation_id: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


_current: ContextVar[CallContext | None] = ContextVar("quire_call", default=None)


def begin_call(call: CallContext) -> None:
    """What runs from here on, in this task and those that it starts, serves `call`.

    It is never undone: a call has a task of its own, and what the HTTP server logs of it after the
    application has returned or failed belongs to it as well.
    """
    _current.set(call)


def current_call() -> CallContext | None:
    """The call that is being served; None outside of any."""
    return _current.get()
