"""Counts of character sets, and the bounds of intersections."""

import pytest

from quire.text.grammars.intersections.regex_sets import NUM_CHARACTERS, regex_sets
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
)


def of(regex: str) -> SetCount:
    return SetCount(regex_sets(regex))


def at(count: SetCount, character: str) -> int:
    return count.counts()[min(ord(character), 128)]


def test_sets_with_a_character_are_added_up_and_multiplied_in_intersections() -> None:
    one, other = of("[ab][bc]c"), of("[bd].")
    assert [at(one, each) for each in "abcd"] == [1, 2, 2, 1]
    assert [at(either([one, other]), each) for each in "abcd\u00e9"] == [2, 4, 3, 2, 1]
    assert either([one, NOTHING]) is one and either([]) is NOTHING
    both = intersection([one, other])
    assert [at(both, each) for each in "abcd"] == [1, 4, 2, 2]
    assert both.num_members == 2 and either([both, one]).num_members == 1
    whole = intersection([both, one])
    assert at(whole, "b") == 8 and whole.num_members == 3


def test_a_complement_multiplies_nothing() -> None:
    one = of("[ab][bc]c")
    assert complement(complement(one)) is one and max(complement(one).counts()) == 1
    assert at(intersection([one, *[complement(one)] * MAX_COMPLEMENTS]), "b") == 2
    with pytest.raises(TooManyMembersError, match="65 complements"):
        intersection([one, *[complement(one)] * (MAX_COMPLEMENTS + 1)])
    with pytest.raises(TooManyMembersError, match="1001 different character sets"):
        complement(SetCount(others=(MAX_COMPLEMENT_SETS + 1,) * NUM_CHARACTERS))


def test_too_many_members_and_too_many_sets_with_one_character() -> None:
    intersection([of("[ab]")] * MAX_MEMBERS)
    with pytest.raises(TooManyMembersError, match="9 expressions must match the same text"):
        intersection([of("[ab]")] * (MAX_MEMBERS + 1))
    intersection([of("[ab][bc]")] * 6)
    with pytest.raises(TooManyMembersError, match="multiply to 128, and may to 64"):
        intersection([of("[ab][bc]")] * 7)
    intersection([of("[ab][cd][ef][gh]")] * MAX_MEMBERS)


def test_few_members_may_have_more_sets_with_one_character_than_many() -> None:
    for num_members, most in ((2, 38), (5, 4), (6, 2), (8, 1)):
        many = SetCount(others=(most,) * NUM_CHARACTERS)
        more = SetCount(others=(most + 1,) * NUM_CHARACTERS)
        intersection([many] * num_members)
        with pytest.raises(TooManyMembersError, match="multiply to"):
            intersection([more] * num_members)
