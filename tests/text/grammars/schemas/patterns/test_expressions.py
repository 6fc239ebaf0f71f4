"""Patterns of ECMA-262 without look-ahead: which characters they match."""

import re

import pytest

from quire.text.grammars.schemas.patterns.character_sets import ANY, complement, union
from quire.text.grammars.schemas.patterns.expressions import parsed, written


def as_python(pattern: str) -> re.Pattern[str]:
    text = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return re.compile(text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (".", ["a", "é", "😀"], ["\n", "\r", "\u2028"]),
        (r"\s", [" ", "\u00a0", "\ufeff", "\u3000"], ["a", "\u200b"]),
        (r"\S", ["a", "\u200b"], ["\ufeff"]),
        (r"[^\d]", ["a"], ["1"]),
        (r"[\D]", ["a"], ["1"]),
        (r"[^\Da]", ["1"], ["a", "b"]),
        ("[a&&b]", ["&", "a", "b"], ["c"]),
        ("[[~-]", ["[", "~", "-"], ["\\"]),
        ("[^]", ["\n", "a"], []),
        ("[]", [], ["a", ""]),
        (r"[\b]", ["\b"], ["b"]),
        (r"\u0061\x62\u{63}\cA", ["abc\x01"], ["abcA"]),
        (r"\ud83d\ude00", ["😀"], ["\ud83d"]),
        ("a{,2}", ["a{,2}"], ["aa"]),
        ("{}]", ["{}]"], [""]),
        ("a{2}?b*?", ["aa", "aabb"], ["a"]),
        ("(?<year>a)(?P<month>b)", ["ab"], ["a"]),
        ("(?:ab)+|c", ["abab", "c"], ["aba"]),
        ("(?:a+)?", ["", "aa"], ["b"]),
        (r"\/\-\~", ["/-~"], ["\\/"]),
    ],
)
def test_characters(pattern: str, good: list[str], bad: list[str]) -> None:
    text = written(parsed(pattern))
    assert written(parsed(text)) == text
    for each in good:
        assert as_python(text).fullmatch(each), each
    for each in bad:
        assert not as_python(text).fullmatch(each), each


def test_unicode_properties_stay_as_they_are() -> None:
    assert written(parsed(r"\p{L}[^\P{Lu}a-c]")) == r"\p{L}[^a-c\P{Lu}]"


def test_sets_of_characters() -> None:
    assert complement(()) == ANY
    assert complement(ANY) == ()
    assert union(((5, 7),), ((1, 4),), ((7, 9),)) == ((1, 9),)
    assert complement(((0, 0xD7FE),)) == ((0xD7FF, 0xD7FF), (0xE000, 0x10FFFF))
