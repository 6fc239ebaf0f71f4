"""Counts the values in JSON data from clients, to refuse data that would take too long.

Python's `json` functions hold the GIL for the whole call, so large data would block all other
threads. Called before a client's data is written, parsed, or passed to templates and grammars.
"""

import re
from typing import Any

_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
"""Matches a whole string, or one of the characters after which a value begins."""


def has_more_values(value: Any, bound: int) -> bool:
    """True if all nested lists and objects together hold more than `bound` values. Stops counting
    there."""
    count, rest = 0, [value]
    while rest:
        inner = rest.pop()
        if isinstance(inner, (dict, list)):
            count += len(inner)
            if count > bound:
                return True
            rest += inner.values() if isinstance(inner, dict) else inner
    return False


def text_has_more_values(text: str, bound: int) -> bool:
    """`has_more_values` for JSON text. False if the text is not an object.

    An empty list or object counts as two values.
    """
    if not text.lstrip().startswith("{") or sum(map(text.count, ",[{")) <= bound:
        return False
    count = 0
    for found in _MARKS.finditer(text):
        count += found[0][0] != '"'
        if count > bound:
            return True
    return False
