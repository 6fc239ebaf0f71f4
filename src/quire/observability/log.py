"""Logging: one format, to stderr, set up by whoever owns the process.

Importing this has no side effects, and nothing is printed before `configure`, warnings aside (the
standard library's own last resort). A library user who sets up `logging` himself need not call it.
Knows nothing of the rest of quire. `cli` calls `configure`; everybody but core calls `get_logger`.
"""

import logging
import sys

from quire.errors import ConfigurationError

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`. Below the logger `quire` that `configure` sets."""
    inside = name == "quire" or name.startswith("quire.")
    return logging.getLogger(name if inside else f"quire.{name}")


def configure(level: str = "warning") -> None:
    """Print quire's log lines of `level` and above to stderr. A second call only sets the level.

    level: one of LEVELS, in any case. Raises ConfigurationError for any other.
    """
    if level.lower() not in LEVELS:
        raise ConfigurationError(
            f"the log level is {level!r}, but must be one of {', '.join(LEVELS)}"
        )
    logger = logging.getLogger("quire")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the moment of writing, not at the moment of set-up."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # closed or full: a lost log line must not end a request
            self.handleError(record)
