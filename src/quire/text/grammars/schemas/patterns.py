"""Regular expressions of JSON Schema (ECMA-262's) in the dialect of the grammar engine.

The two write most things alike and a few differently, which would silently mean something else:
what a dot and \\s match, and what [, & and ~ are in a class. Those are translated; what the engine
has no means for (look-around, back references, word boundaries) is refused by name.
"""

import re

from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS
from quire.text.grammars.schemas.refusals import refusal

_ESCAPES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}",
    "t": r"\t",
    "n": r"\n",
    "r": r"\r",
    "f": r"\x0c",
    "v": r"\x0b",
    "0": r"\x00",
}
"""What may stand in a class for each escaped letter."""

_SETS = "dws"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_HEXADECIMAL = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\((?:\?:|\?<[A-Za-z_][A-Za-z0-9_]*>|(?!\?))")
_SPECIAL = frozenset(r"\^$.*+?()[]{}|/-&~#")


def engine_pattern(pattern: object, pointer: str, keyword: str, origin: str) -> str:
    """`pattern`, at `pointer` under `keyword`, as llguidance writes it; found anywhere in a text.

    Raises InvalidRequestError for what can't be written.
    """
    if not isinstance(pattern, str):
        raise refusal(origin, pointer, f"{keyword} must be a string")
    if len(pattern) > MAX_EXPRESSION_CHARACTERS:
        raise refusal(
            origin,
            pointer,
            f"{keyword} has {len(pattern)} characters;"
            f" it may have up to {MAX_EXPRESSION_CHARACTERS}",
        )
    try:
        return _Translation(pattern).run()
    except ValueError as error:
        raise refusal(origin, pointer, f"{keyword} {pattern[:100]!r}: {error}") from error


class _Translation:
    """One pattern, read from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def run(self) -> str:
        parts: list[str] = []
        while self._at < len(self._pattern):
            parts.append(self._next())
        return "".join(parts)

    def _take(self, num_characters: int) -> str:
        taken = self._pattern[self._at : self._at + num_characters]
        self._at += num_characters
        return taken

    def _next(self) -> str:
        character = self._pattern[self._at]
        if character == ".":
            self._at += 1
            return _ANY
        if character == "\\":
            self._at += 1
            text, is_set = self._escape()
            return f"[{text}]" if is_set else text
        if character == "[":
            self._at += 1
            return self._class()
        if character == "(":
            group = _GROUP.match(self._pattern, self._at)
            if group is None:
                raise ValueError("look-around and flags are not supported")
            self._at = group.end()
            return "(" if group[0] == "(" else "(?:"
        if character == "{" and _COUNT.match(self._pattern, self._at) is None:
            self._at += 1
            return r"\{"
        if character == "}" and not self._closes_count():
            self._at += 1
            return r"\}"
        return _escaped(self._take(1)) if character in "&~#-/" else self._take(1)

    def _closes_count(self) -> bool:
        opened = self._pattern.rfind("{", 0, self._at)
        count = _COUNT.match(self._pattern, opened) if opened >= 0 else None
        return count is not None and count.end() == self._at + 1

    def _escape(self) -> tuple[str, bool]:
        """What stands behind a backslash: text for a class, and whether it has to be in one."""
        if self._at >= len(self._pattern):
            raise ValueError("it ends with a backslash")
        digits = _HEXADECIMAL.match(self._pattern, self._at)
        if digits is not None:
            self._at = digits.end()
            return self._character(int(digits[1] or digits[2] or digits[3], 16)), False
        unicode_property = _PROPERTY.match(self._pattern, self._at)
        if unicode_property is not None:
            self._at = unicode_property.end()
            return "\\" + unicode_property[0], False
        letter = self._take(1)
        if letter in _SETS:
            return _ESCAPES[letter], True
        if letter.lower() in _SETS:
            return "^" + _ESCAPES[letter.lower()], True
        if letter == "c" and self._at < len(self._pattern) and self._pattern[self._at].isalpha():
            return f"\\x{ord(self._take(1)) % 32:02x}", False
        if letter in _ESCAPES:
            return _ESCAPES[letter], False
        if letter.isascii() and letter.isalnum():
            kind = "back references are" if letter.isdigit() else f"\\{letter} is"
            raise ValueError(f"{kind} not supported")
        return _escaped(letter), False

    def _character(self, code: int) -> str:
        if 0xD800 <= code < 0xDC00:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
            if low is None:
                raise ValueError("half of a surrogate pair is no character")
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if 0xDC00 <= code < 0xE000 or code > 0x10FFFF:
            raise ValueError(f"{code:x} is no character")
        return f"\\x{{{code:x}}}"

    def _class(self) -> str:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        complements: list[str] = []
        while True:
            if self._at >= len(self._pattern):
                raise ValueError("a class is not closed")
            character = self._take(1)
            if character == "]":
                break
            if character == "\\":
                if self._pattern.startswith("b", self._at):
                    self._at += 1
                    parts.append(r"\x08")
                    continue
                text, is_set = self._escape()
                (complements if is_set and text[0] == "^" else parts).append(text)
            else:
                parts.append(_escaped(character) if character in "[&~^#" else character)
        return _joined(parts, complements, negated)


def _joined(parts: list[str], complements: list[str], negated: bool) -> str:
    inside = "".join(parts) + "".join(f"[{text}]" for text in complements)
    if not inside:
        return r"[\x00-\x{10ffff}]" if negated else r"[^\x00-\x{10ffff}]"
    return f"[{'^' if negated else ''}{inside}]"


def _escaped(character: str) -> str:
    return "\\" + character if character in _SPECIAL else character
