"""Parses the regular expressions for marks in response templates.

A response template is a setting of transformers (see `response_template`). Its expressions may
contain literal text, white space, named groups and alternatives. Expressions with anything else are
refused, since quire's parsers and grammars of calls support only literal marks.
"""

import re
from typing import NoReturn, TypeAlias

Parts: TypeAlias = tuple[str, ...]
"""Alternating literal texts and group names: text, name, text, ..., name, text."""

SPACE = "\n"
"""In a text of Parts, stands for any white space, including none; grammars write a line break
there."""

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
    """Raised if a response template can't be converted to quire's formats. The message says why."""


def refuse(why: str) -> NoReturn:
    """Raises UnmappableError."""
    raise UnmappableError(why)


def sequences(pattern: str) -> list[Parts]:
    """The alternatives of a pattern, without white space at their ends.

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
            refuse(f"its pattern {pattern!r} is not a literal mark")
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
