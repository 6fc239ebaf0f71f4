"""One format, no side effects at import, and a level that can be changed."""

import contextvars
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigurationError
from quire.observability.log import (
    LIBRARIES,
    CallContext,
    arguments,
    begin_call,
    configure,
    fields,
    get_logger,
    is_json,
)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The logger `quire`; it and those of libraries are put back afterwards as they were."""
    loggers = [logging.getLogger(name) for name in ("quire", *LIBRARIES)]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
    yield loggers[0]
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quire.engine.engine", "quire.engine.engine"),
        ("quire", "quire"),
        ("__main__", "quire.__main__"),
        ("quires", "quire.quires"),
    ],
)
def test_every_logger_is_below_quire(name: str, expected: str) -> None:
    assert get_logger(name).name == expected


def test_a_line_names_time_level_process_and_logger(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info")
    get_logger("quire.core").info("%d blocks", 7)
    line = capsys.readouterr().err
    assert line.endswith("quire.core: 7 blocks\n")
    assert " INFO " in line
    assert line[:4].isdigit()


def test_below_the_level_nothing_is_printed(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("warning")
    get_logger("quire.core").info("quiet")
    assert capsys.readouterr().err == ""


def test_a_second_call_sets_the_level_and_adds_no_handler(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("error")
    configure("DEBUG")
    get_logger("quire.core").debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert len(root.handlers) == 1


def test_an_unknown_level_is_refused_by_name(root: logging.Logger) -> None:
    with pytest.raises(ConfigurationError, match=r"'loud'.*debug, info, warning, error"):
        configure("loud")
    assert root.handlers == []


def test_a_closed_stderr_does_not_raise(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise ValueError("I/O operation on closed file")

    configure("info")
    monkeypatch.setattr(sys, "stderr", Closed())
    get_logger("quire.core").info("lost")


def test_importing_it_sets_nothing_up() -> None:
    code = (
        "import logging, quire.observability.log as log; log.get_logger('quire.core')\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('quire').handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_format_is_refused_by_name(root: logging.Logger) -> None:
    with pytest.raises(ConfigurationError, match=r"format is 'xml'.*text, json"):
        configure("info", "xml")
    assert root.handlers == []


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_log_escapes_line_breaks(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    get_logger("quire.core").info("two\nlines, %s", "\u2028ü", extra=fields(status=200, path="/a"))
    (line,) = json_lines(capsys)
    assert line["message"] == "two\nlines, \u2028ü"
    assert (line["level"], line["logger"], line["process"]) == ("info", "quire.core", os.getpid())
    assert (line["status"], line["path"]) == (200, "/a")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert "request_id" not in line


def test_json_has_the_traceback_inside_the_line(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    try:
        raise KeyError("gone")
    except KeyError:
        get_logger("quire.core").exception("it failed")
    (line,) = json_lines(capsys)
    assert line["exception"].endswith("KeyError: 'gone'") and "Traceback" in line["exception"]


def test_values_that_are_no_json_are_logged_as_text(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    get_logger("quire.core").info("odd", extra=fields(what=set))
    (line,) = json_lines(capsys)
    assert line["what"] == "<class 'set'>"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_of_a_call_have_its_request_id(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    def serve() -> None:
        begin_call(CallContext("req-7"))
        get_logger("quire.server").warning("inside")

    configure("info", log_format)
    contextvars.copy_context().run(serve)
    get_logger("quire.server").warning("outside")
    inside, outside = capsys.readouterr().err.splitlines()
    assert "req-7" in inside and "req-7" not in outside
    if log_format == "text":
        assert inside.endswith("inside request_id=req-7")


def test_a_second_call_changes_the_format(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "text")
    configure("info", "json")
    get_logger("quire.core").info("once")
    assert [line["message"] for line in json_lines(capsys)] == ["once"]


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio", "opentelemetry.sdk"])
def test_the_libraries_lines_come_in_the_same_format(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    configure("info", "json")
    logging.getLogger(name).info("not this")
    logging.getLogger(name).error("this")
    assert [(line["logger"], line["message"]) for line in json_lines(capsys)] == [(name, "this")]


def test_warnings_are_json_lines_where_the_log_is(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("soon gone", DeprecationWarning, stacklevel=1)
    (line,) = json_lines(capsys)
    assert line["logger"] == "py.warnings" and "soon gone" in line["message"]


@pytest.mark.parametrize(("log_format", "expected"), [("text", False), ("json", True)])
def test_others_can_ask_whether_lines_are_json(
    root: logging.Logger, log_format: str, expected: bool
) -> None:
    assert not is_json()
    configure("info", log_format)
    assert is_json() is expected


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_another_process_can_be_told_to_log_alike(
    root: logging.Logger, level: str, log_format: str
) -> None:
    configure(level, log_format)
    assert arguments() == ["--log-level", level, "--log-format", log_format]


def test_without_configuration_the_arguments_are_the_defaults(root: logging.Logger) -> None:
    root.setLevel(logging.NOTSET)
    assert arguments() == ["--log-level", "warning", "--log-format", "text"]


FULL_DISK = """
import contextlib, logging, sys
from quire.observability.log import configure, get_logger
configure("debug", sys.argv[1])
for index in range(2000):
    get_logger("quire").warning("line %d %s", index, "x" * 100)
if sys.argv[2] == "close":
    with contextlib.suppress(OSError):
        sys.stderr.close()
    get_logger("quire").warning("after the end")
    sys.stderr = None
    get_logger("quire").warning("after the very end")
print("still there", flush=True)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("ending", ["open", "close"])
def test_a_full_disk_costs_lines_and_nothing_else(log_format: str, ending: str) -> None:
    """Python's own flush at exit fails as well, and shows in the exit code alone."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, log_format, ending],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
        )
    assert done.stdout == "still there\n"
    assert done.returncode in (0, 120)
