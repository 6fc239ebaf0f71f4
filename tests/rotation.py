"""Long test functions take turns: a run with `--rotate` leaves out most of their cases.

`rotated_tests.txt` lists the functions whose cases together take `LEAST_S` seconds or more. Which
quarter of the cases runs depends on the hash of the commit, so it is the same wherever a commit is
tested, and another commit is likely to run another quarter. `--write-rotated`, in a run of all
tests, writes the list anew.
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from zlib import crc32

import pytest

LIST = Path(__file__).parent / "rotated_tests.txt"
ROOT = LIST.parent.parent
NUM_PARTS = 4
LEAST_S = 1.5


def function_of(nodeid: str) -> str:
    """The test function of a case: its node id without parameters, relative to `tests`."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def listed_functions() -> dict[str, float]:
    """Seconds by function, from the list."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {function: float(seconds) for seconds, function in lines}


def write_list(seconds: Mapping[str, float]) -> None:
    """Write the list, the longest function first. seconds: by function, over all its cases."""
    long = [(round(spent, 1), name) for name, spent in seconds.items() if spent >= LEAST_S]
    long.sort(key=lambda line: (-line[0], line[1]))
    LIST.write_text("".join(f"{spent:6.1f} {name}\n" for spent, name in long))


def current_commit(folder: Path = ROOT) -> str | None:
    """The hash of the commit that is checked out; None outside a repository."""
    # A checkout of another user, as in a container, is read all the same.
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def left_out(nodeids: Iterable[str], functions: Iterable[str], commit: str) -> set[str]:
    """The cases of these functions that are not run at a commit."""
    long, turn = set(functions), int(commit[:8], 16) % NUM_PARTS
    return {
        nodeid
        for nodeid in nodeids
        if function_of(nodeid) in long and crc32(nodeid.encode()) % NUM_PARTS != turn
    }


class Rotation:
    """The plugin behind the options `--rotate` and `--write-rotated`."""

    def __init__(self, config: pytest.Config) -> None:
        self._rotates = bool(config.getoption("rotate"))
        self._writes = bool(config.getoption("write_rotated"))
        if self._rotates and self._writes:
            raise pytest.UsageError("--write-rotated measures all tests; leave out --rotate")
        self._summary = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if not self._rotates:
            return
        commit = current_commit()
        if commit is None:
            self._summary = "no commit to choose by, so all long tests run"
            return
        out = left_out([item.nodeid for item in items], listed_functions(), commit)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
        self._summary = (
            f"{len(out)} cases of long tests (tests/rotated_tests.txt) are left out at commit"
            f" {commit[:8]}; `./scripts/test --all` runs them"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._writes:
            self._seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._writes:
            write_list(self._seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._summary:
            terminalreporter.write_sep("-", self._summary)
