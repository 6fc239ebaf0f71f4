"""Tests that are marked `alone` have no other beside them, in however many processes tests run."""

import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rotation import listed_functions
from tests.turns import Turns

WAIT_S = 30
ROOT = Path(__file__).parent.parent


class Taker(threading.Thread):
    """Takes one turn, for as long as it is let, and writes down when."""

    def __init__(self, folder: Path, name: str, events: list[str], *, is_alone: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.turns = Turns(folder)  # a file of its own, as another process has
        self.events = events
        self.is_alone = is_alone
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        with self.turns.turn(is_alone=self.is_alone):
            self.events.append(f"{self.name} begins")
            self.has_begun.set()
            assert self.may_end.wait(WAIT_S)
            self.events.append(f"{self.name} ends")

    def end(self) -> None:
        self.may_end.set()
        self.join(WAIT_S)
        self.turns.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "door", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def _wait_until_somebody_stands_in(door: int) -> None:
    while True:
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(door, fcntl.LOCK_UN)


def test_many_at_once_or_one_alone_and_nobody_overtakes_it(tmp_path: Path, door: int) -> None:
    events: list[str] = []
    one, two, later = (
        Taker(tmp_path, name, events, is_alone=False) for name in ("one", "two", "later")
    )
    alone = Taker(tmp_path, "alone", events, is_alone=True)
    for taker in (one, two):
        taker.start()
        assert taker.has_begun.wait(WAIT_S)  # both at once
    alone.start()
    _wait_until_somebody_stands_in(door)
    later.start()
    one.end()
    assert not alone.has_begun.is_set() and not later.has_begun.is_set()
    two.end()
    assert alone.has_begun.wait(WAIT_S)
    assert not later.has_begun.is_set()
    alone.end()
    assert later.has_begun.wait(WAIT_S)
    later.end()
    assert events[4:] == ["alone begins", "alone ends", "later begins", "later ends"]


TESTS = """
import os, pathlib, time
import pytest

FOLDER = pathlib.Path(__file__).parent

def others():
    return [path.name for path in FOLDER.glob("*.runs") if path.stem != str(os.getpid())]

def run(meanwhile):
    mine = FOLDER / f"{os.getpid()}.runs"
    mine.touch()
    meanwhile()
    mine.unlink()

def meet():
    (FOLDER / f"{os.getpid()}.met").touch()
    deadline_s = time.monotonic() + 30
    while len(list(FOLDER.glob("*.met"))) < 2:
        assert time.monotonic() < deadline_s, "the other process runs no test at the same time"

@pytest.mark.parametrize("index", range(8))
def test_together(index):
    run(meet)

@pytest.mark.alone
@pytest.mark.parametrize("index", range(8))
def test_alone(index):
    def be_alone():
        for _ in range(20):
            assert others() == []
    run(be_alone)
"""


# The two processes meet in tests that run together. If one of them first had a test that runs
# alone, it would wait for the other to end, which waits for it.
TOGETHER_FIRST = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
"""


def test_the_mark_holds_over_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(TOGETHER_FIRST)
    (tmp_path / "test_marked.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n")
    options = ["-n", "2", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "--basetemp", "b", str(tmp_path)],
        env=os.environ
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "16 passed" in run.stdout


# ---- tests/README.md -----------------------------------------------------------------------------

FOLDER = Path(__file__).parent
MARKED = re.compile(r"^@pytest\.mark\.alone\n(?:@.*\n|[ \])].*\n)*(?:async )?def (\w+)", re.M)
TEST_NAME = re.compile(r"`(?:(?:\w+/)*test_\w+\.py::)?(test_\w+|Test\w+)`")


def _sources() -> list[str]:
    return [path.read_text() for path in FOLDER.rglob("test_*.py") if path != Path(__file__)]


def test_the_page_says_which_tests_run_alone() -> None:
    section = (FOLDER / "README.md").read_text().partition("| alone |")[2].partition("\n#")[0]
    marked = {name for source in _sources() for name in MARKED.findall(source)}
    assert set(TEST_NAME.findall(section)) == marked


def test_the_tests_that_the_page_and_the_list_name_are_there() -> None:
    named = set(TEST_NAME.findall((FOLDER / "README.md").read_text()))
    named |= {function.split("::")[1] for function in listed_functions()}
    sources = _sources()
    assert [
        name
        for name in sorted(named)
        if not any(re.search(rf"^(?:def |class |){name}\b", source, re.M) for source in sources)
    ] == []
    assert len(named) > 20


def test_the_page_says_what_each_folder_is_for() -> None:
    rows = re.findall(r"^\| ([`\w, ]+) \| [^|]+ \|$", (FOLDER / "README.md").read_text(), re.M)
    folders = {path.relative_to(FOLDER).parts[0] for path in FOLDER.glob("*/**/test_*.py")}
    described = {name for row in rows for name in re.findall(r"`(?!test_)([a-z_]+)`", row)}
    assert described == folders
