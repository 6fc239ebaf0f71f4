"""Reads changed files from the history of a git repository.

The newest commits come first, and each file counts once, so that the changes differ.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.errors import QuireError

LEAST_CHARS, MOST_CHARS = 800, 3000
MOST_CHANGED = 0.5
"""The largest share of a file's lines that a change may add."""


class HistoryError(QuireError):
    """The history can't be read, or has too few changes."""


class Change(NamedTuple):
    """A file before and after a commit."""

    path: str
    #: The first line of the commit's message.
    title: str
    old: str
    new: str


def changes(repository: Path) -> Iterator[Change]:
    """The changes of short Python files, newest first, each file once.

    Raises HistoryError if `repository` is no git repository, or a file's content is missing.
    """
    listed = _git(
        repository, "log", "--no-merges", "--no-renames", "--diff-filter=M", "--numstat",
        "--format=commit %H %s", "--", "*.py",
    )  # fmt: skip
    seen: set[str] = set()
    commit = title = ""
    for line in listed.splitlines():
        if line.startswith("commit "):
            _, commit, title = line.split(" ", 2)
        elif line:
            added, _, path = line.split("\t")
            if path in seen or not added.isdigit() or int(added) < 2:
                continue
            new = _git(repository, "show", f"{commit}:{path}")
            is_short = LEAST_CHARS <= len(new) <= MOST_CHARS
            if is_short and int(added) <= MOST_CHANGED * len(new.splitlines()):
                seen.add(path)
                yield Change(path, title, _git(repository, "show", f"{commit}^:{path}"), new)


def _git(repository: Path, *arguments: str) -> str:
    command = ("git", "-C", str(repository), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HistoryError(f"git can't read the history of {repository}: {done.stderr.strip()}")
    return done.stdout
