"""Parses regular expressions of JSON Schema (ECMA-262), and writes them in llguidance's syntax.

The two syntaxes differ in the meanings of a dot and \\s, and of [, & and ~ in a class. Without a
translation, such expressions would silently match different texts. Back references, word boundaries
and look-behind are refused with an error that names them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.text.grammars.schemas.patterns.character_sets import (
    DIGITS,
    LINE_ENDS,
    SPACES,
    WORD,
    Ranges,
    class_text,
    complement,
    union,
)


@dataclass(frozen=True, slots=True)
class Characters:
    """Matches one character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Properties:
    """Matches one character of a class with Unicode properties. `text` is in llguidance's
    syntax."""

    text: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Matches a sequence of parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """Matches one of several alternative parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches a part `least` to `most` times; if `most` is None, without an upper bound."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """A look-ahead: `part` must match at this position; if is_negative, it must not match."""

    part: "Node"
    is_negative: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """Matches at the start of the text, or at its end (^ or $)."""

    is_end: bool


Node = Characters | Properties | Chain | Choice | Repeat | Look | Edge

_MAX_NESTING = 100
_HEXADECIMAL = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[ux]\{([0-9a-fA-F]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_COUNT = re.compile(r"(?:([*+?])|\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_][A-Za-z0-9_]*>|\?([=!])|(?!\?))")
_SETS = {"d": DIGITS, "s": SPACES, "w": WORD}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def parsed(pattern: str) -> Node:
    """The syntax tree of `pattern`. Raises ValueError for an invalid or unsupported expression."""
    parser = _Parser(pattern)
    node = parser.choice(0)
    if not parser.is_at_end:
        raise ValueError("a ) has no matching (")
    return node


class _Parser:
    """A recursive-descent parser for one pattern. Methods raise ValueError."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._pattern)

    def choice(self, depth: int) -> Node:
        """Parse alternatives up to the end of the group or the pattern."""
        if depth > _MAX_NESTING:
            raise ValueError(f"groups nest deeper than {_MAX_NESTING}")
        branches: list[Node] = []
        parts: list[Node] = []
        while not self.is_at_end and not self._sees(")"):
            if self._sees("|"):
                self._at += 1
                branches.append(chained(parts))
                parts = []
            else:
                parts.append(self._counted(self._atom(depth)))
        branches.append(chained(parts))
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sees(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _read(self, num_characters: int) -> str:
        taken = self._pattern[self._at : self._at + num_characters]
        self._at += num_characters
        return taken

    def _counted(self, atom: Node) -> Node:
        count = _COUNT.match(self._pattern, self._at)
        if count is None:
            return atom
        if isinstance(atom, Look | Edge):
            raise ValueError(f"{count[0]} after a part that matches no character is not supported")
        self._at = count.end()
        if _COUNT.match(self._pattern, self._at):
            raise ValueError(f"{count[0]} is followed by another quantifier")
        if count[1]:
            return Repeat(atom, int(count[1] == "+"), 1 if count[1] == "?" else None)
        least = int(count[2])
        most = least if count[3] is None else int(count[4]) if count[4] else None
        if most is not None and most < least:
            raise ValueError(f"{count[0]} has a maximum below its minimum")
        return Repeat(atom, least, most)

    def _atom(self, depth: int) -> Node:
        if self._sees("("):
            return self._group(depth)
        if _COUNT.match(self._pattern, self._at):
            raise ValueError(f"{self._read(1)} has nothing to repeat")
        character = self._read(1)
        if character == ".":
            return Characters(complement(LINE_ENDS))
        if character in "^$":
            return Edge(character == "$")
        if character == "[":
            return self._class()
        if character == "\\":
            escaped = self._escape()
            return Properties(escaped) if isinstance(escaped, str) else Characters(escaped)
        return Characters(((ord(character), ord(character)),))

    def _group(self, depth: int) -> Node:
        group = _GROUP.match(self._pattern, self._at)
        if group is None:
            raise ValueError("look-behind and flags are not supported")
        self._at = group.end()
        inside = self.choice(depth + 1)
        if not self._sees(")"):
            raise ValueError("a group is not closed")
        self._at += 1
        return inside if group[1] is None else Look(inside, group[1] == "!")

    def _escape(self) -> Ranges | str:
        """Parse an escape after its backslash. Returns its characters, or the text of a Unicode
        property."""
        if self.is_at_end:
            raise ValueError("it ends with a backslash")
        digits = _HEXADECIMAL.match(self._pattern, self._at)
        if digits is not None:
            self._at = digits.end()
            code = self._character(int(digits[1] or digits[2] or digits[3], 16))
            return ((code, code),)
        unicode_property = _PROPERTY.match(self._pattern, self._at)
        if unicode_property is not None:
            self._at = unicode_property.end()
            return "\\" + unicode_property[0]
        letter = self._read(1)
        if letter in _SETS:
            return _SETS[letter]
        if letter.lower() in _SETS:
            return complement(_SETS[letter.lower()])
        if letter in _CONTROLS:
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if letter == "c" and self._pattern[self._at : self._at + 1].isalpha():
            code = ord(self._read(1)) % 32
            return ((code, code),)
        if letter.isascii() and letter.isalnum():
            kind = "back references are" if letter.isdigit() else f"\\{letter} is"
            raise ValueError(f"{kind} not supported")
        return ((ord(letter), ord(letter)),)

    def _character(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00:
            low = _LOW_SURROGATE.match(self._pattern, self._at)
            if low is None:
                raise ValueError("half of a surrogate pair is not a character")
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if 0xDC00 <= code < 0xE000 or code > 0x10FFFF:
            raise ValueError(f"{code:x} is not a character")
        return code

    def _class(self) -> Node:
        is_negated = self._sees("^")
        self._at += is_negated
        ranges: list[Ranges] = []
        properties: list[str] = []
        while not self._sees("]"):
            member = self._member()
            if isinstance(member, str):
                properties.append(member)
                continue
            if self._sees("-") and not self._sees("-]"):
                self._at += 1
                last = self._member()
                if isinstance(last, str) or _width(last) > 1 or _width(member) > 1:
                    raise ValueError("a set is the end of a range in a class")
                if last[0][0] < member[0][0]:
                    raise ValueError("a range in a class ends before it begins")
                member = ((member[0][0], last[0][0]),)
            ranges.append(member)
        self._at += 1
        members = union(*ranges)
        if properties:
            return Properties(class_text(members, properties, is_negated=is_negated))
        return Characters(complement(members) if is_negated else members)

    def _member(self) -> Ranges | str:
        if self.is_at_end:
            raise ValueError("a class is not closed")
        character = self._read(1)
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._sees("b"):
            self._at += 1
            return ((8, 8),)
        return self._escape()


def _width(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)


def chained(parts: Iterable[Node]) -> Node:
    """The sequence of the parts as one node. Nested chains are flattened."""
    flat: list[Node] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Chain) else [part])
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def written(node: Node) -> str:
    """`node` in llguidance's syntax. It may not contain look-ahead."""
    match node:
        case Characters(ranges):
            return class_text(ranges)
        case Properties(text):
            return text
        case Edge(is_end):
            return "$" if is_end else "^"
        case Chain(parts):
            return "".join(_grouped(part, (Choice,)) for part in parts)
        case Choice(parts):
            return "|".join(map(written, parts))
        case Repeat(part, least, most):
            return _grouped(part, (Choice, Chain, Repeat)) + count_text(least, most)
        case Look():
            raise AssertionError("a look-ahead has no text")


def _grouped(node: Node, kinds: tuple[type, ...]) -> str:
    return f"(?:{written(node)})" if isinstance(node, kinds) else written(node)


def count_text(least: int, most: int | None) -> str:
    """The quantifier for `least` to `most` repetitions."""
    if least == most:
        return f"{{{least}}}"
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
