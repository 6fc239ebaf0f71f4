"""Tests run in forks of the process that has collected them, each once, whatever ends a process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

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


def run_pytest(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n    long\n")
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--basetemp", "b"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words, str(folder)],
        env=os.environ
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return run.returncode, run.stdout


def test_results_are_those_of_one_process_and_a_death_is_the_failure_of_its_test(
    tmp_path: Path,
) -> None:
    code, output = run_pytest(tmp_path, "-n", "2", "-rs")
    assert code == 1
    assert "2 failed, 24 passed, 1 skipped" in output
    assert "said before it fails" in output and "said by a child" in output
    assert "lacks something" in output
    assert "the process that ran the test ended with -9" in output
    assert "output of" not in output


def test_no_test_begins_after_the_failure_that_ends_a_run(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "-n", "1", "-x")
    assert code == 1
    assert "1 failed, 12 passed" in output
    assert "stopping after 1 failures" in output
