"""Writes literal texts and regular expressions in the syntax of llguidance's Lark."""

import json
import re

import llguidance

_UNWRITABLE = re.compile("[\x00-\x1f\x7f]")
"""Control characters, which must be escaped in a Lark literal."""


def literal(text: str) -> str:
    """A Lark term that matches exactly `text`."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNWRITABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def expression(regex: str) -> str:
    """A Lark term for the strings that `regex` matches in full; \\d matches ASCII digits only."""
    if not regex:
        return '""'
    term = llguidance.regex_to_lark(regex, "d")
    return "/" + _UNWRITABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", term) + "/"
