"""Titles of commits: at most 72 columns, one thought, in the imperative."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.commit_titles import complaint, main

ROOT = Path(__file__).parent.parent

#: The last commit whose title was written before these rules.
LAST_UNCHECKED = "069aaa746ffe92b2bfe271375ebd5b5c10d95911"


def git(*words: str) -> str | None:
    """The output of a git command in this repository; None where there is no such thing."""
    try:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout if found.returncode == 0 else None


def test_new_titles_are_short_imperatives() -> None:
    titles = git("log", "--no-merges", "--format=%s", f"{LAST_UNCHECKED}..HEAD")
    if titles is None:
        pytest.skip("this checkout has no history from the last commit that is not checked")
    found = [f"{title!r} {wrong}" for title in titles.splitlines() if (wrong := complaint(title))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("tiers/disk: throttle writers with a deadline instead of polling", None),
        ("Speed up the start", None),
        ("tiers/disk: who is held back sleeps until its time", "but with 'who'"),
        ("core: the queue is kept sorted", "but with 'the'"),
        ("core: sorted the queue", "but with 'sorted'"),
        ("core: sort the queue; drop the heap", "several thoughts"),
        (f"core: sort {'x' * 72}", "has 83 columns"),
    ],
)
def test_a_poor_title_is_found(title: str, expected: str | None) -> None:
    found = complaint(title)
    assert found is None if expected is None else expected in str(found)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("core: sort the queue\n\nIts order was that of the arrivals; now it is kept.\n", None),
        ("\n# a comment; of git\ncore: sort the queue\n", None),
        ("Merge branch 'a; b'\n", None),
        ("fixup! core: sorted the queue\n", None),
        ("core: sorted the queue\n\ncore: sort it\n", "with 'sorted'.\nWrite `part: verb what`"),
    ],
)
def test_the_hook_reads_the_title_of_a_message(
    message: str, expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message)
    assert main([str(path)]) == (0 if expected is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if expected is None else expected in printed


def test_git_refuses_a_commit_with_a_poor_title(tmp_path: Path) -> None:
    if git("--version") is None:
        pytest.skip("this machine has no git")
    for name in ("scripts", "tools", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "commit-msg", tmp_path / "scripts")
    shutil.copy(ROOT / "tools" / "commit_titles.py", tmp_path / "tools")
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)

    # A hook that runs the tests would name its own repository.
    environment = {name: value for name, value in os.environ.items() if "GIT_" not in name}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert run("init", "-q").returncode == 0
    (tmp_path / ".git" / "hooks" / "commit-msg").symlink_to(tmp_path / "scripts" / "commit-msg")
    refused = run("commit", "-q", "--allow-empty", "-m", "core: sorted the queue")
    assert (refused.returncode, "but with 'sorted'" in refused.stderr) == (1, True)
    assert run("commit", "-q", "--allow-empty", "-m", "core: sort the queue").returncode == 0
    assert run("log", "--format=%s").stdout == "core: sort the queue\n"
