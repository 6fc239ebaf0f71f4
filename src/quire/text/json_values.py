"""Counts the values inside of JSON, before it is written or read in one go.

Python's functions for JSON are single calls in C, during which nothing else happens, whatever
thread they are in. Called where templates and grammars are given what a client sent.
"""

import re
from typing import Any

_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
"""Texts, with whatever is in them; and the signs that values begin behind."""


def has_more_values(value: Any, bound: int) -> bool:
    """Whether there are more values than the bound inside of lists and objects, at any depth. Looks
    at no more than that."""
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
    """The same of an object's JSON text; False for the text of anything else.

    Empty lists and objects count twice.
    """
    if not text.lstrip().startswith("{") or sum(map(text.count, ",[{")) <= bound:
        return False
    count = 0
    for found in _MARKS.finditer(text):
        count += found[0][0] != '"'
        if count > bound:
            return True
    return False
