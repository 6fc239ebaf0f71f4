"""Logging to stderr, as text or JSON.

The program that owns the process sets it up. Importing this has no side effects, and nothing is
printed before `configure`, warnings aside (the standard library's own last resort). A library user
who sets up `logging` himself need not call it. Knows nothing of the rest of quire but which HTTP
call the running code serves: `server.telemetry` begins a call, and its tasks and threads find it
through a context variable, so that nothing in between has to pass it on. `cli.main` and the engine
process call `configure`.
"""

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire.errors import ConfigurationError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

LIBRARIES = ("uvicorn", "asyncio", "opentelemetry", "py.warnings")
"""Their warnings and errors are printed as ours are: JSON lines have nothing else among them. The
last is where `logging` puts what Python's `warnings` would print, while lines are JSON."""

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


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


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`. Below the logger `quire` that `configure` sets."""
    inside = name == "quire" or name.startswith("quire.")
    return logging.getLogger(name if inside else f"quire.{name}")


def configure(level: str = "warning", log_format: str = "text") -> None:
    """Print log lines of `level` and above to stderr. A second call sets both anew.

    level: one of LEVELS, in any case, of what libraries log, warnings at least.
    log_format: one of FORMATS. Raises ConfigurationError for any other.
    """
    for value, what, known in ((level.lower(), "level", LEVELS), (log_format, "format", FORMATS)):
        if value not in known:
            raise ConfigurationError(
                f"the log {what} is {value!r}, but must be one of {', '.join(known)}"
            )
    quire_logger = logging.getLogger("quire")
    quire_logger.setLevel(level.upper())
    handler = _own_handler(quire_logger) or _StderrHandler()
    handler.setFormatter(_JSONFormatter() if log_format == "json" else _TextFormatter())
    for logger in (quire_logger, *map(logging.getLogger, LIBRARIES)):
        if logger is not quire_logger:
            logger.setLevel(max(logging.WARNING, quire_logger.level))
        if _own_handler(logger) is None:
            logger.addHandler(handler)
            logger.propagate = False
    logging.captureWarnings(log_format == "json")


def is_json() -> bool:
    """Whether log lines are JSON objects: then nothing else may be written to stderr."""
    handler = _own_handler(logging.getLogger("quire"))
    return handler is not None and isinstance(handler.formatter, _JSONFormatter)


def arguments() -> list[str]:
    """The command-line arguments with which another process of ours logs as this one does."""
    logger = logging.getLogger("quire")
    number = logger.getEffectiveLevel()
    names = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
    level = next((name for bound, name in names.items() if number <= bound), "error")
    return ["--log-level", level, "--log-format", "json" if is_json() else "text"]


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For a logging call's `extra`: facts that JSON lines have by name beside the message."""
    return {"fields": values}


class _TextFormatter(logging.Formatter):
    """For people: one line, with the request id at its end where a call is served."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _DATE_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        call = current_call()
        line = super().formatMessage(record)
        return line if call is None else f"{line} request_id={call.request_id}"


class _JSONFormatter(logging.Formatter):
    """For programs: one object a line, whatever the message, a traceback or a name has in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        call = current_call()
        if call is not None:
            line["request_id"] = call.request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII: no encoding of stderr can fail at it.
        return json.dumps(line, default=str)


def _timestamp(created_s: float) -> str:
    """Seconds since the epoch -> RFC 3339 with microseconds, in UTC."""
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="microseconds")


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the moment of writing, not at the moment of set-up.

    A line that can't be written is lost and nothing else: neither a full disk nor a closed stderr
    may end a request, and there is nowhere to complain.
    """

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        stderr = sys.stderr
        if stderr is None:
            return
        try:
            stderr.write(line)
            stderr.flush()
        except (OSError, ValueError):  # full; closed
            return


def _own_handler(logger: logging.Logger) -> logging.Handler | None:
    return next((each for each in logger.handlers if isinstance(each, _StderrHandler)), None)
