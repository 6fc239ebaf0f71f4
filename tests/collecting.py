"""Has each process of a run collect another part of the tests first.

pytest compiles each file of tests itself where it has kept nothing of it, as in a new checkout: 18
seconds of processor time. Processes that go through the files in one order would each compile each
file, at the same time. So they begin at different places, and find what the others have compiled.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

ENTRIES = pytest.StashKey[list[str]]()
"""The names of all files and folders of tests, in the order in which every process has them."""


def begin_elsewhere(config: pytest.Config, environment: Mapping[str, str]) -> None:
    """Rotate what is collected, if all tests are and pytest-xdist has started this process."""
    count = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or config.args != config.getini("testpaths"):
        return
    folder = config.rootpath / config.args[0]
    entries = sorted(path.name for path in folder.iterdir() if is_collected(path))
    config.stash[ENTRIES] = entries
    first = len(entries) * int(environment["PYTEST_XDIST_WORKER"].removeprefix("gw")) // count
    config.args = [str(folder / name) for name in (*entries[first:], *entries[:first])]


def is_collected(path: Path) -> bool:
    """Whether pytest looks for tests there: a folder, or a file of tests."""
    return (path.is_dir() and path.name != "__pycache__") or path.match("test_*.py")


def put_in_one_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort what was collected as in all processes: pytest-xdist names a test by its place."""
    if ENTRIES not in config.stash:
        return
    place = {name: index for index, name in enumerate(config.stash[ENTRIES])}
    folder = config.rootpath / config.getini("testpaths")[0]
    items.sort(key=lambda item: place[item.path.relative_to(folder).parts[0]])


FIRST = ("alone", "long")
"""The marks of tests that begin first, in this order."""


def put_first(items: list[pytest.Item]) -> None:
    """Put the tests that run alone, then the long ones, before all others.

    All other processes then wait only once for those that run alone, at a time when their tests are
    short: a test that runs alone waits for the tests that other processes have begun. A long test
    that began last would leave processors idle.
    """

    def place(item: pytest.Item) -> int:
        marks = (at for at, mark in enumerate(FIRST) if item.get_closest_marker(mark))
        return next(marks, len(FIRST))

    items.sort(key=place)
