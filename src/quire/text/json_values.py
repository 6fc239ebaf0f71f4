"""Counts the values in JSON, before it is written or parsed in one call.

Each of Python's JSON functions is a single call in C that blocks all other threads. Called before
data of a client goes to templates and grammars.
"""

import re
from typing import Any

_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
"""A string with its contents, or one of the characters after which a value begins."""


def has_more_values(value: Any, bound: int) -> bool:
    """Whether lists and objects, at any depth, hold more values than the bound. Stops counting at
    the bound."""
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
    """`has_more_values` for the JSON text of an object; False for text of any other value.

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
