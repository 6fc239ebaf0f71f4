"""Logging to stderr, as text or JSON.

`cli.main` and the engine process call `configure`. Importing the module has no side effects, and
before `configure` only warnings are printed, by the standard library. Programs that configure
`logging` themselves need not call it. `server.telemetry` stores the HTTP call that the current task
serves in a context variable. Log lines include the request id of this call.
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
"""Loggers of libraries whose warnings and errors are printed in our format, so that a JSON log has
only JSON lines. `logging` sends Python's warnings to the last of them if lines are JSON."""

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


@dataclass(slots=True)
class CallContext:
    """One HTTP call, from its first header to its last byte."""

    #: The id that the client sent, or else a generated id.
    request_id: str
    #: The start of the call on the monotonic clock, in seconds.
    began_s: float = 0.0
    #: The start of the call in nanoseconds since the epoch.
    began_at_ns: int = 0
    #: The client's trace headers (W3C Trace Context); "" if it sent none.
    traceparent: str = ""
    tracestate: str = ""
    #: The monitor sets the following fields. `generation_id` is None if nothing was generated.
    generation_id: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


_current: ContextVar[CallContext | None] = ContextVar("quire_call", default=None)


def begin_call(call: CallContext) -> None:
    """Mark `call` as served by this task and by all tasks that it starts from now on.

    The mark is never removed, because each call has its own task. Lines that the HTTP server logs
    after the application has returned or failed belong to the call as well.
    """
    _current.set(call)


def current_call() -> CallContext | None:
    """The call that the current task serves, or None."""
    return _current.get()


def get_logger(name: str) -> logging.Logger:
    """The logger for a module's `__name__`: a child of the logger `quire`, which `configure` sets
    up."""
    inside = name == "quire" or name.startswith("quire.")
    return logging.getLogger(name if inside else f"quire.{name}")


def configure(level: str = "warning", log_format: str = "text") -> None:
    """Print log lines of `level` and above to stderr. A later call replaces both settings.

    level is one of LEVELS in upper or lower case; libraries log warnings and errors only.
    log_format is one of FORMATS. Raises ConfigurationError for other values.
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
    """Whether log lines are JSON objects. If so, only log lines may be written to stderr."""
    handler = _own_handler(logging.getLogger("quire"))
    return handler is not None and isinstance(handler.formatter, _JSONFormatter)


def arguments() -> list[str]:
    """The command-line arguments that make a child process log like this process."""
    logger = logging.getLogger("quire")
    number = logger.getEffectiveLevel()
    names = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
    level = next((name for bound, name in names.items() if number <= bound), "error")
    return ["--log-level", level, "--log-format", "json" if is_json() else "text"]


def fields(**values: object) -> dict[str, dict[str, object]]:
    """The argument `extra` of a logging call: named values to show beside the message in JSON."""
    return {"fields": values}


class _TextFormatter(logging.Formatter):
    """Formats a readable line, which ends with the request id if a call is served."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _DATE_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        call = current_call()
        line = super().formatMessage(record)
        return line if call is None else f"{line} request_id={call.request_id}"


class _JSONFormatter(logging.Formatter):
    """Formats one JSON object per line, also for messages and tracebacks with line breaks."""

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
        # The line is ASCII, so that every encoding of stderr can write it.
        return json.dumps(line, default=str)


def _timestamp(created_s: float) -> str:
    """Seconds since the epoch -> RFC 3339 with microseconds, in UTC."""
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="microseconds")


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which may change after the set-up.

    A line that can't be written is dropped without an error, because a full disk or a closed stderr
    must not end a request.
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
