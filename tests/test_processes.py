"""Tests run in forks of the process that has collected them, each once, whatever ends a process."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import pytest
from tests.processes import Queue, num_processes

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "num_processors", "expected"),
    [("auto", 1, 1), ("auto", 2, 3), ("auto", 16, 4), ("0", 2, 0), ("7", 2, 7)],
)
def test_the_number_of_processes(text: str, num_processors: int, expected: int) -> None:
    assert num_processes(text, num_processors) == expected


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="-n takes a number of processes or auto, not '-1'"):
        num_processes("-1", 2)


@pytest.fixture
def lock_file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


@pytest.mark.parametrize("order", ["010101", "011111", "000001", "01" * 30])
@pytest.mark.parametrize("num_first", [0, 1, 3, 20])
def test_each_test_is_taken_once(lock_file: IO[bytes], order: str, num_first: int) -> None:
    queue = Queue(lock_file, num_first, 20, 2)
    taken: list[int] = []
    while len(taken) < 20:
        for process in order:
            index = queue.take(int(process))
            if index is not None:
                taken.append(index)
    assert sorted(taken) == list(range(20))
    assert taken[:num_first] == list(range(num_first))
    assert queue.take(0) is queue.take(1) is None


def test_a_process_takes_its_own_range_and_then_half_of_the_longest(lock_file: IO[bytes]) -> None:
    queue = Queue(lock_file, 2, 12, 2)
    assert [queue.take(0) for _ in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert queue.take(1) == 7
    assert [queue.take(0) for _ in range(2)] == [10, 11]
    queue.clear()
    assert queue.take(1) is None


TESTS = """
import os, pathlib, signal, sys
import pytest

PARENT = os.getpid()

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    yield folder
    assert list(folder.iterdir())

@pytest.mark.parametrize("index", range(12))
def test_passes(index, made, tmp_path):
    assert os.getpid() != PARENT
    print(f"output of {index}")
    (made / str(index)).touch()

def test_fails():
    print("said before it fails")
    os.system("echo said by a child")
    assert 1 + 1 == 3

def test_is_skipped():
    pytest.skip("lacks something")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("index", range(12))
def test_passes_too(index):
    pass
"""


SETTINGS = """
[pytest]
filterwarnings = error
markers =
    alone
    long
"""


def run_pytest(folder: Path, *words: str, tests: str = TESTS) -> tuple[int, str]:
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text(SETTINGS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--basetemp", "b"]
    with (folder / "output").open("w+") as output:  # a pipe would be open in what tests fork
        code = subprocess.call(
            [sys.executable, "-m", "pytest", *options, *words, str(folder)],
            env=os.environ
            | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=100,
        )
        output.seek(0)
        return code, output.read()


def test_results_are_those_of_one_process_and_a_death_is_the_failure_of_its_test(
    tmp_path: Path,
) -> None:
    code, output = run_pytest(tmp_path, "-n", "2", "-rs", "--junit-xml", "results.xml")
    assert code == 1
    assert "2 failed, 24 passed, 1 skipped" in output
    assert "said before it fails" in output and "said by a child" in output
    assert "lacks something" in output
    assert "the process that ran the test ended with -9" in output
    assert "output of" not in output
    (suite,) = ElementTree.parse(tmp_path / "results.xml").getroot()
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "27", "failures": "2", "errors": "0", "skipped": "1"}


def test_no_test_begins_after_the_failure_that_ends_a_run(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", "-x")
    assert code == 1
    assert "1 failed, 12 passed" in output
    assert "stopping after 1 failures" in output


ONE_FAILS = """
import time

def test_fails():
    assert not "this"

def test_runs_no_more():
    pass

def test_waits_until_the_other_has_failed():
    time.sleep(2)

def test_is_taken_meanwhile():
    pass
"""


def test_no_process_begins_the_test_that_it_has_taken_after_a_failure(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "-n", "2", "-x", tests=ONE_FAILS)
    assert code == 1
    assert "1 failed, 1 passed" in output


ONE_ENDS = """
import os

def sender(request):
    plugins = request.config.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if type(plugin).__name__ == "Sender")

def test_ends(request):
    {}

def test_passes():
    pass
"""
AMID_A_MESSAGE = "os.write(sender(request)._connection.fileno(), b'aaa') and os._exit(7)"


@pytest.mark.parametrize(("statement", "status"), [("os._exit(0)", 0), (AMID_A_MESSAGE, 7)])
def test_a_process_that_ends_before_its_last_message_has_died(
    tmp_path: Path, statement: str, status: int
) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", tests=ONE_ENDS.format(statement))
    assert code == 1
    assert f"the process that ran the test ended with {status}" in output
    assert "1 failed, 1 passed" in output


def test_a_process_that_stops_its_session_stops_the_run(tmp_path: Path) -> None:
    tests = ONE_ENDS.format("request.session.shouldstop = 'enough tests'")
    code, output = run_pytest(tmp_path, "-n", "1", tests=tests)
    assert code == pytest.ExitCode.INTERRUPTED
    assert "enough tests" in output and "1 passed" in output


def test_a_run_fails_that_lacks_the_end_of_a_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item):\n"
        "    return item.name == 'test_ends' or None\n"
    )
    code, output = run_pytest(tmp_path, "-n", "1", tests=ONE_ENDS)
    assert code == pytest.ExitCode.INTERNAL_ERROR
    assert "no process has reported the end of test_some.py::test_ends" in output
    assert "1 passed" in output


LEAVES_A_SOCKET = """
import socket

def test_leaves_a_socket_in_a_cycle():
    kept = [socket.socket()]
    kept.append(kept)
"""


def test_what_the_last_test_leaves_makes_the_run_fail(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", tests=LEAVES_A_SOCKET)
    assert code == pytest.ExitCode.INTERNAL_ERROR
    assert "unclosed <socket" in output and "1 passed" in output


FORKS = """
import os, pathlib, time

def test_forks():
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    pathlib.Path("pid").write_text(str(pid))
"""


def test_a_run_does_not_wait_for_what_its_tests_have_forked(tmp_path: Path) -> None:
    try:
        code, output = run_pytest(tmp_path, "-n", "1", tests=FORKS)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert code == 0, output


IS_INTERRUPTED = """
import os, pathlib, signal, time
import pytest

# Jobs of a shell in the background ignore it, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.fixture(scope="module")
def made():
    yield
    time.sleep(0.5)
    pathlib.Path("torn down").touch()

def test_is_interrupted(made):
    {}
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("os.kill(os.getppid(), signal.SIGINT)", pytest.ExitCode.INTERRUPTED),
        ("os.kill(os.getpid(), signal.SIGINT)", pytest.ExitCode.INTERNAL_ERROR),
    ],
)
def test_fixtures_are_torn_down_after_an_interrupt(
    tmp_path: Path, statement: str, expected: pytest.ExitCode
) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", tests=IS_INTERRUPTED.format(statement))
    assert code == expected, output
    assert (tmp_path / "torn down").exists()


WARNS = """
import warnings
import pytest

@pytest.mark.filterwarnings("default")
def test_warns():
    class OwnWarning(UserWarning):
        pass
    warnings.warn(OwnWarning("take care"), source=lambda: None)
"""


def test_a_warning_of_any_class_is_shown(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", tests=WARNS)
    assert code == 0, output
    assert "OwnWarning: take care" in output
