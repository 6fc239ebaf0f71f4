"""Checks titles of commits: `python -m tools.commit_titles FILE`, the file of a commit's message.

`scripts/commit-msg` runs it as a hook of git. `tests/test_commit_titles.py` holds all new commits
of the repository to the same rule.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_COLUMNS = 72

#: First words of titles that are no imperative.
NO_IMPERATIVE = re.compile(
    r"(?i)(the|a|an|what|who|whoever|of|those|one|no|nothing|it|its)\b|\w+(ed|ing)\b"
)

#: Imperatives that end like participles.
IMPERATIVES = frozenset({"bring", "embed", "feed", "need", "shed", "speed", "string"})

#: Beginnings of titles that git writes: of merges, and of commits for `rebase --autosquash`.
WRITTEN_BY_GIT = ("Merge ", "fixup! ", "squash! ", "amend! ")


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


def title_of(message: str) -> str:
    """The first line of a message that is neither empty nor a comment; "" if there is none."""
    lines = (line.strip() for line in message.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def main(words: Sequence[str]) -> int:
    """Print the fault of the message's title. Returns 1 if there is one."""
    (path,) = words
    title = title_of(Path(path).read_text())
    if title.startswith(WRITTEN_BY_GIT) or (fault := complaint(title)) is None:
        return 0
    print(
        f"The commit's title {title!r} {fault}.\n"
        "Write `part: verb what`, such as"
        " `tiers/disk: throttle writers with a deadline instead of polling`.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
