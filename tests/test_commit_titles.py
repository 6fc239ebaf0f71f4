"""Titles of commits: at most 72 columns, one thought, in the imperative."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The last commit whose title was written before these rules.
LAST_UNCHECKED = "069aaa746ffe92b2bfe271375ebd5b5c10d95911"

MAX_COLUMNS = 72

#: First words of titles that are no imperative.
NO_IMPERATIVE = re.compile(
    r"(?i)(the|a|an|what|who|whoever|of|those|one|no|nothing|it|its)\b|\w+(ed|ing)\b"
)

#: Imperatives that end like participles.
IMPERATIVES = frozenset({"bring", "embed", "feed", "need", "shed", "speed", "string"})


def complaint(title: str) -> str | None:
    """The fault of a title; None if there is none."""
    if len(title) > MAX_COLUMNS:
        return f"has {len(title)} columns, above {MAX_COLUMNS}"
    if ";" in title:
        return "joins several thoughts with ';'"
    words = title.rpartition(": ")[2].split()
    first = words[0] if words else ""
    if first.lower() not in IMPERATIVES and NO_IMPERATIVE.match(first):
        return f"does not begin with an imperative, but with {first!r}"
    return None


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
