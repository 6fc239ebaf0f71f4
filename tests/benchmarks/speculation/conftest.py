"""A small git repository with changed files and a page."""

import subprocess
from pathlib import Path

import pytest


def source(num_functions: int, *, number: int = 0, changed: int = -1) -> str:
    """A Python file, of which one function may be changed."""
    lines = [f'"""File {number}."""\n']
    for index in range(num_functions):
        what = "changed" if index == changed else "plain"
        lines.append(
            f"\ndef _{what}_{index}(first_value, second_value):\n"
            f'    """Add two {what} numbers, as function {index} of file {number} does."""\n'
            f"    total = first_value + second_value + {index}\n    return total\n"
        )
    return "".join(lines)


def _git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three files of eight functions, of which a second commit changes one each."""
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    (folder / "docs").mkdir()
    (folder / "docs" / "page.md").write_text("A line of a page that says little.\n" * 60)
    _git(tmp_path, "init", str(folder))
    for title, changed in (("begin", -1), ("change a function", 3)):
        for number in range(3):
            text = source(8, number=number, changed=changed)
            (folder / "src" / f"part_{number}.py").write_text(text)
        _git(folder, "add", ".")
        _git(folder, "commit", "-m", title)
    return folder
