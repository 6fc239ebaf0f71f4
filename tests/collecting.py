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


def put_alone_first(items: list[pytest.Item]) -> None:
    """So that all other processes wait only once, at a time when their tests are short.

    A test that runs alone has to wait for the test that another process has begun, half a minute
    for the longest.
    """
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)
