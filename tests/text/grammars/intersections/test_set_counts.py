"""Counts of character sets: of regular expressions, and of what is made of them."""

import pytest

from quire.text.grammars.intersections.set_counts import (
    MAX_COMPLEMENT_SETS,
    MAX_COMPLEMENTS,
    MAX_MEMBERS,
    NOTHING,
    SetCount,
    TooManyMembersError,
    complement,
    either,
    intersection,
    regex_sets,
)


@pytest.mark.parametrize(
    ("regex", "sets"),
    [
        ("abc", {"literal"}),
        (r"^\^[a-z]+.{2,3}$", {"literal", "[a-z]", "."}),
        (r"[]a][^]b][\]c][a[^b]]", {"[]a]", "[^]b]", r"[\]c]", "[a[^b]]"}),
        (r"\d\D\w\p{Lu}\PN\x{4e}\n", {r"\d", r"\D", r"\w", r"\p{Lu}", r"\P", "literal"}),
        ("(?s:.)*.", {"literal", ".", "other dot"}),
        ("a{2}|{", {"literal"}),
        ("[abc", {"[abc"}),
        ("\\", {"literal"}),
    ],
)
def test_sets_of_a_regular_expression(regex: str, sets: set[str]) -> None:
    assert regex_sets(regex).sets == sets


def test_sets_are_added_up_in_alternatives_and_multiplied_in_intersections() -> None:
    one, other = regex_sets("[a][b]c"), regex_sets("[b][d]")
    assert either([one, other]).total == 4
    assert either([one, NOTHING]) is one and either([]) is NOTHING
    both = intersection([one, other])
    assert (both.total, both.num_members) == (6, 2)
    assert (intersection([both, one]).total, intersection([both, one]).num_members) == (18, 3)
    assert either([both, one]).num_members == 1


def test_a_complement_multiplies_nothing() -> None:
    one = regex_sets("[a][b]c")
    assert complement(one).total == 1 and complement(complement(one)) is one
    assert intersection([one, *[complement(one)] * MAX_COMPLEMENTS]).total == 3
    with pytest.raises(TooManyMembersError, match="65 complements"):
        intersection([one, *[complement(one)] * (MAX_COMPLEMENTS + 1)])
    with pytest.raises(TooManyMembersError, match="1001 different character classes"):
        complement(SetCount(num_others=MAX_COMPLEMENT_SETS + 1))


def test_too_many_members_and_too_many_sets() -> None:
    intersection([regex_sets("a")] * MAX_MEMBERS)
    with pytest.raises(TooManyMembersError, match="9 expressions must match the same text"):
        intersection([regex_sets("a")] * (MAX_MEMBERS + 1))
    with pytest.raises(TooManyMembersError, match="multiply to 6561"):
        intersection([regex_sets("[a][b]c")] * 8)
