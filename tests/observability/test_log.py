"""One format, no side effects at import, and a level that can be changed."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.errors import ConfigurationError
from quire.observability.log import configure, get_logger


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The logger `quire`, put back afterwards as it was."""
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    logger.handlers.clear()
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


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

    monkeypatch.setattr(logging, "raiseExceptions", False)
    configure("info")
    monkeypatch.setattr(sys, "stderr", Closed())
    get_logger("quire.core").info("lost")


def test_importing_it_sets_nothing_up() -> None:
    code = (
        "import logging, quire.observability.log as log; log.get_logger('quire.core')\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('quire').handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
