"""Character sets of regular expressions, and their characters."""

import pytest

from quire.text.grammars.intersections.regex_sets import ALL, characters, literal_set, regex_sets


@pytest.mark.parametrize(
    ("regex", "sets"),
    [
        ("aab", {"'a", "'b"}),
        (r"^\^[a-z]+.{2,3}$", {r"'\^", "[a-z]", "."}),
        (r"[]a][^]b][\]c][a[^b]]", {"[]a]", "[^]b]", r"[\]c]", "[a[^b]]"}),
        (r"\d\w\p{Lu}\PN\x{4e}\n", {r"\d", r"\w", r"\p{Lu}", r"\P", "'N", r"'\x{4e}", r"'\n"}),
        ("(?s:.)*é", {".", "..", "':", "'s", "'\x80"}),
        ("(?i)a[b]", {"i'a", "i[b]", "i'i"}),
        ("a{2}|{", {"'a"}),
        ("[abc", {"[abc"}),
        ("", set()),
    ],
)
def test_sets_of_a_regular_expression(regex: str, sets: set[str]) -> None:
    assert regex_sets(regex) == sets


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("'a", "a", "bA"),
        (r"'\x{41}", "A", "a"),
        ("'\x80", "é", "a"),
        ("[a-c]", "abc", "dAé"),
        ("[^a-c]", "dé", "abc"),
        (r"[\x{4e00}b]", "b日", "a"),
        (r"[0-9A-Za-z_]", "aZ9_", "é-"),
        ("i[a-c]", "aB", "dD"),
        ("i'x", "xX", "y"),
        ("[a[^b]]", "ab", ""),
        ("[a&&b]", "ab", ""),
        (r"[\p{Lu}]", "aA", ""),
        ("[z-a]", "az", ""),
        (r"\d", "5a", ""),
        (".", "aé", ""),
        ("[abc", "a", ""),
    ],
)
def test_characters_of_a_set(text: str, inside: str, outside: str) -> None:
    mask = characters(text)
    assert all(mask >> min(ord(each), 128) & 1 for each in inside)
    assert not any(mask >> min(ord(each), 128) & 1 for each in outside)
    assert mask <= ALL


def test_literal_has_a_set_per_distinct_character() -> None:
    assert literal_set("aab\u00e9\u65e5") == {"'a", "'b", "'\x80"}
