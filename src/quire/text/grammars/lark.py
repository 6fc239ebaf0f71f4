"""Writes texts and regular expressions as terms of llguidance's Lark dialect."""

import json
import re

import llguidance

_UNWRITABLE = re.compile("[\x00-\x1f\x7f]")
"""Characters that must be escaped in a Lark text."""


def literal(text: str) -> str:
    """A term that matches exactly `text`."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNWRITABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def expression(regex: str) -> str:
    """A term that matches the strings that `regex` matches fully; \\d means ASCII digits."""
    if not regex:
        return '""'
    term = llguidance.regex_to_lark(regex, "d")
    return "/" + _UNWRITABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", term) + "/"
