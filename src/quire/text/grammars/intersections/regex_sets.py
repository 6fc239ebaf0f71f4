"""Finds the character sets (classes) in a regular expression, and the characters of each.

A set is represented by a text, such as "[a-z]". Its characters are a bit mask with one bit for each
ASCII character, and one bit for all other characters together. A class that can't be parsed counts
as the class of all characters.
"""

import re
import string
import warnings
from functools import lru_cache

NUM_CHARACTERS = 129
"""Number of bits of a mask: one for each ASCII character, and one for all other characters."""

ALL = (1 << NUM_CHARACTERS) - 1
_OTHER = 1 << 128
_ASCII = "".join(map(chr, range(128)))
_LITERAL = "'"
"""A set of one character is represented by this prefix and the character."""

_FOLDED = "i"
"""A set that ignores case is represented by this prefix and the set's text."""

_FOLDING = re.compile(r"\(\?[a-z]*i")
_CLASS_ESCAPE = re.compile(r"\\[pPdDwWsS]")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[\s\S]|\Z)")
_COUNT = re.compile(r"\{\d*,?\d*\}")
_NESTED = re.compile(r"\[|&&|--|~~|\|\|")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]|\\[xuUpPdDwWsS]")


def literal_set(text: str) -> frozenset[str]:
    """The sets of a literal `text`: one for each different character."""
    return frozenset(_LITERAL + (each if each.isascii() else "\x80") for each in text)


def regex_sets(regex: str) -> frozenset[str]:
    """The sets of a regular expression, as texts for `characters`."""
    found: set[str] = set()
    at = 0
    while at < len(regex):
        end = _part_end(regex, at)
        part = regex[at:end]
        if part[0] in ".[" or _CLASS_ESCAPE.match(part):
            found.add(part)
        elif part[0] == "\\":
            found.add(_LITERAL + part)
        elif part[0] not in "^$()|*+?{":
            found |= literal_set(part)
        at = end
    if "." in found and "(?" in regex:  # flags may give dots two meanings
        found.add("..")
    if _FOLDING.search(regex):
        return frozenset(_FOLDED + each for each in found)
    return frozenset(found)


@lru_cache(maxsize=4_096)
def characters(text: str) -> int:
    """The characters of the set that `text` represents, as a bit mask."""
    if text.startswith(_FOLDED):
        found = characters(text[1:])
        for lower, upper in zip(string.ascii_lowercase, string.ascii_uppercase, strict=True):
            both = 1 << ord(lower) | 1 << ord(upper)
            if found & both:
                found |= both
        return found
    if text.startswith(_LITERAL):
        return _of_class(f"[{text[1:]}]") if text[1] == "\\" else min(1 << ord(text[1]), _OTHER)
    return _of_class(text) if text[0] == "[" else ALL


def _of_class(text: str) -> int:
    if _NESTED.search(text, 1) or "\\p" in text or "\\P" in text:
        return ALL
    written = re.sub(r"\\x\{0*([0-9a-fA-F]{1,6})\}", lambda found: _code(found[1]), text)
    try:
        with warnings.catch_warnings(action="error"):
            of_ascii = re.compile(written, re.ASCII).findall(_ASCII)
    except (re.error, Warning, OverflowError, ValueError):
        return ALL
    found = sum(1 << ord(each) for each in of_ascii)
    return found | _OTHER if text[1] == "^" or _BEYOND_ASCII.search(text) else found


def _code(digits: str) -> str:
    return f"\\U{int(digits, 16):08x}"


def _part_end(regex: str, at: int) -> int:
    """The position after the class, escape, quantifier or character that begins at `at`."""
    if regex[at] == "\\":
        escape = _ESCAPE.match(regex, at)
        return escape.end() if escape is not None else at + 1
    if regex[at] == "{":
        count = _COUNT.match(regex, at)
        return count.end() if count is not None else at + 1
    if regex[at] != "[":
        return at + 1
    depth, at = 1, at + 1
    is_first = True
    while at < len(regex) and depth:
        character = regex[at]
        if character == "^" and is_first:
            at += 1
            continue
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
        elif character == "]" and not is_first:
            depth -= 1
        is_first = character == "["
        at += 1
    return min(at, len(regex))
