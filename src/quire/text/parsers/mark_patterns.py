"""Parses the regular expressions with which response templates find marks.

Such an expression is literal text with white space and named groups, perhaps with alternatives. All
other expressions are refused, since our readers and writers of calls know no patterns. Knows no
dialects.
"""

import re
from typing import NoReturn, TypeAlias

Parts: TypeAlias = tuple[str, ...]
"""A text, a group's name, a text, ..., a group's name, and a text."""

SPACE = "\n"
"""Stands for any white space, which may be empty; grammars write this character for it."""

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\\s|\\n|\n|[ ])[*+?]?\??)
    | \(\?P<(?P<group>\w+)>(?:\\w|\\S|\[\^?[^\]]+\]|\.)[*+]\??\)
    | \(\?:(?P<branches>(?:[^()\\]|\\.)*)\)
    | (?P<branch>\|)
    | \\(?P<escaped>[^\w\s])
    | (?P<plain>[^\\()\[\]{}.*+?^$|\s])
    """,
    re.VERBOSE,
)
_FOLLOWED_BY_COUNT = re.compile(r"[*+?{]")


class UnmappableError(Exception):
    """A response template can't be used. The message says why."""


def refuse(why: str) -> NoReturn:
    """Raises UnmappableError."""
    raise UnmappableError(why)


def sequences(pattern: str) -> list[Parts]:
    """The alternatives of a pattern, without white space around them.

    Raises UnmappableError.
    """
    return [_trimmed(parts) for parts in _alternatives(pattern)]


def _trimmed(parts: Parts) -> Parts:
    if len(parts) == 1:
        return (parts[0].strip(SPACE),)
    return (parts[0].lstrip(SPACE), *parts[1:-1], parts[-1].rstrip(SPACE))


def _alternatives(pattern: str) -> list[Parts]:
    done: list[Parts] = []
    open_: list[Parts] = [("",)]
    at = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        is_counted = found is not None and _FOLLOWED_BY_COUNT.match(pattern, found.end())
        if found is None or (is_counted and not found["space"]):
            refuse(f"it looks for the pattern {pattern!r}, which is more than marks")
        at = found.end()
        if found["branch"]:
            done, open_ = done + open_, [("",)]
        elif found["branches"] is not None:
            tails = _alternatives(found["branches"])
            open_ = [_joined(head, tail) for head in open_ for tail in tails]
        else:
            open_ = [_joined(head, _part(found)) for head in open_]
    return done + open_


def _part(found: re.Match[str]) -> Parts:
    if found["group"]:
        return "", found["group"], ""
    return (SPACE if found["space"] else found["escaped"] or found["plain"],)


def _joined(head: Parts, tail: Parts) -> Parts:
    middle = head[-1] + tail[0]
    return (*head[:-1], middle.replace(SPACE * 2, SPACE), *tail[1:])
