"""Counts the character sets of regular expressions, and bounds the cost of intersections.

The members of an intersection are expressions that must match the same text. llguidance intersects
each character set of a member with each set of all other members, and checks its limits only
afterwards. If sets of all members contain a common character, the numbers of these sets multiply.
13 members with two such sets each took seconds; three with 400 sets each took a minute and
gigabytes. So this module bounds the number of members, and for each character the product of the
numbers of sets that contain it. A complement multiplies nothing. Called by `lark_check`, and for
schemas by `schemas.intersected_strings`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add, mul

from quire.text.grammars.intersections.regex_sets import ALL, NUM_CHARACTERS, characters

MAX_MEMBERS = 8
"""Maximum number of members of an intersection, without complements. Password rules have four or
five."""

_FEW_MEMBERS = 5
MAX_MEETING_OF_FEW = 1_500
MAX_MEETING_OF_SIX = 256
MAX_MEETING_OF_MORE = 64
"""Bounds for intersections of up to five, six, and more members. They bound, for each character,
the product over all members of the number of sets that contain the character. A password rule with
five look-aheads has a product of 72. In hostile grammars, five members took 0.05 s at 1,700, six
0.5 s at 729, seven 6 s at 128 (a Zen 5 core)."""

MAX_COMPLEMENTS = 64
"""Maximum number of complements in one intersection, since at each character all of them are
compared with each other."""

MAX_COMPLEMENT_SETS = 1_000
"""Maximum number of character sets in one complement, since all pairs are compared."""

Counts = tuple[int, ...]
"""For each character, the number of sets that contain it."""

_NONE: Counts = (0,) * NUM_CHARACTERS
ONE_OF_ALL: Counts = (1,) * NUM_CHARACTERS


class TooManyMembersError(ValueError):
    """An intersection has too many members or character sets. The message gives the limit."""


@dataclass(frozen=True, slots=True)
class SetCount:
    """The character sets of a regular expression."""

    #: The sets that occur in the expression, as texts of `regex_sets`.
    sets: frozenset[str] = frozenset()
    #: For each character, an upper bound of the number of further sets that contain it: the sets
    #: that result from intersections in the expression.
    others: Counts = _NONE
    #: Number of members if the expression is an intersection, else 1. An outer intersection sums
    #: these numbers.
    num_members: int = 1
    #: Number of complements among the members. An outer intersection sums these numbers.
    num_complements: int = 0
    #: The operand if the expression is a complement; otherwise None.
    negated: "SetCount | None" = None

    def counts(self) -> Counts:
        """For each character, the number of sets that contain it; at least 1."""
        found = list(self.others)
        for each in self.sets:
            mask = characters(each)
            if mask == ALL:
                found = [count + 1 for count in found]
                continue
            while mask:
                lowest = mask & -mask
                found[lowest.bit_length() - 1] += 1
                mask ^= lowest
        return tuple(max(1, count) for count in found)


NOTHING = SetCount(num_members=0)
"""The `SetCount` of an expression without characters."""

IMPORTED = SetCount(others=(4,) * NUM_CHARACTERS)
"""The `SetCount` of a terminal that is defined elsewhere: `%import common.NUMBER`."""


def either(parts: Iterable[SetCount]) -> SetCount:
    """The `SetCount` of alternatives, or of parts in sequence."""
    found = [part for part in parts if part != NOTHING]
    if len(found) == 1:
        return found[0]
    if not found:
        return NOTHING
    others = _NONE
    for part in found:
        if part.others is not _NONE:
            others = tuple(map(add, others, part.others))
    return SetCount(frozenset().union(*(part.sets for part in found)), others)


def complement(of: SetCount) -> SetCount:
    """The `SetCount` of the complement of `of`. Raises TooManyMembersError."""
    if of.negated is not None:
        return of.negated
    num_sets = len(of.sets) + max(of.others)
    if num_sets > MAX_COMPLEMENT_SETS:
        raise TooManyMembersError(
            f"a complement (~) has {num_sets} different character sets in it; it may have up to"
            f" {MAX_COMPLEMENT_SETS}"
        )
    return SetCount(others=ONE_OF_ALL, num_members=0, num_complements=1, negated=of)


def intersection(members: Iterable[SetCount]) -> SetCount:
    """The `SetCount` of the intersection of all members. Raises TooManyMembersError."""
    found = [member for member in members if member != NOTHING]
    if len(found) == 1:
        return found[0]
    num_members = sum(member.num_members for member in found)
    num_complements = sum(member.num_complements for member in found)
    meeting = ONE_OF_ALL
    for member in found:
        # llguidance processes a complement one set at a time, so it multiplies nothing.
        if member.negated is None:
            meeting = tuple(map(mul, meeting, member.counts()))
    check_intersection(num_members, meeting)
    if num_complements > MAX_COMPLEMENTS:
        raise TooManyMembersError(
            f"an intersection has {num_complements} complements (~); it may have up to"
            f" {MAX_COMPLEMENTS}: write what they exclude as the alternatives of one"
        )
    return SetCount(frozenset(), meeting, num_members, num_complements)


def check_intersection(num_members: int, meeting: Counts) -> None:
    """Raises TooManyMembersError if an intersection would cost too much.

    `meeting` is, for each character, the product over all members of the number of the member's
    sets that contain the character.
    """
    if num_members > MAX_MEMBERS:
        raise TooManyMembersError(
            f"{num_members} expressions must match the same text; up to {MAX_MEMBERS} may: join"
            " some of them into one"
        )
    bound = _max_meeting(num_members)
    if num_members > 1 and max(meeting) > bound:
        raise TooManyMembersError(
            f"{num_members} expressions that must match the same text have too many character"
            f" classes with the same characters: their numbers multiply to {max(meeting)}, and may"
            f" to {bound}; use fewer classes, classes that exclude each other, or fewer"
            " expressions"
        )


def _max_meeting(num_members: int) -> int:
    if num_members <= _FEW_MEMBERS:
        return MAX_MEETING_OF_FEW
    return MAX_MEETING_OF_SIX if num_members == _FEW_MEMBERS + 1 else MAX_MEETING_OF_MORE
