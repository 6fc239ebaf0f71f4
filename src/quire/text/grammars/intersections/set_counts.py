"""Counts the character sets of expressions, and bounds what intersections of these cost.

llguidance follows an intersection by comparing each character set of one member with each of every
other member, and looks at its fuel only afterwards. Where sets of all members have a character in
common, their numbers multiply, and what comes of it is compared again: 13 patterns with two such
sets each kept it busy for seconds, three with 400 for a minute and with gigabytes. So the number of
members and the most sets that meet in one character are bounded here. A complement is followed one
set at a time and multiplies nothing. Called by `lark_check`, and for schemas by
`schemas.intersected_strings`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add, mul

from quire.text.grammars.intersections.regex_sets import ALL, NUM_CHARACTERS, characters

MAX_MEMBERS = 8
"""Members of one intersection, complements not counted. Password rules have four or five."""

_FEW_MEMBERS = 5
MAX_MEETING_OF_FEW = 1_500
MAX_MEETING_OF_SIX = 256
MAX_MEETING_OF_MORE = 64
"""Product of the numbers of sets that an intersection's members have for one character, by the
number of members: 72 in a rule for passwords with five look-aheads. In hostile grammars up to five
members took 0.05 s at 1,700, six 0.5 s at 729, seven 6 s at 128 (one core of a Zen 5)."""

MAX_COMPLEMENTS = 64
"""Of one intersection: each is compared with all others at every character."""

MAX_COMPLEMENT_SETS = 1_000
"""Character sets in one complement: every two are compared."""

Counts = tuple[int, ...]
"""How many sets have each character."""

_NONE: Counts = (0,) * NUM_CHARACTERS
ONE_OF_ALL: Counts = (1,) * NUM_CHARACTERS


class TooManyMembersError(ValueError):
    """Says what there is too much of in an intersection, and how much there may be."""


@dataclass(frozen=True, slots=True)
class SetCount:
    """Which character sets an expression has.

    sets: those written in it; see `regex_sets`. others: upper bounds on further ones, which
    intersections in it make. num_members, num_complements: of the intersection that it is, to be
    added up where it is a member of another one. negated: what it is the complement of, if it is.
    """

    sets: frozenset[str] = frozenset()
    others: Counts = _NONE
    num_members: int = 1
    num_complements: int = 0
    negated: "SetCount | None" = None

    def counts(self) -> Counts:
        """How many of its sets have each character; at least one, as a set to compare with."""
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
"""Of an expression without characters."""

IMPORTED = SetCount(others=(4,) * NUM_CHARACTERS)
"""Of a terminal that is defined elsewhere: `%import common.NUMBER`."""


def either(parts: Iterable[SetCount]) -> SetCount:
    """The count of alternatives, or of parts that follow one another."""
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
    """The count of what `of` does not match. Raises TooManyMembersError."""
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
    """The count of what all members match. Raises TooManyMembersError."""
    found = [member for member in members if member != NOTHING]
    if len(found) == 1:
        return found[0]
    num_members = sum(member.num_members for member in found)
    num_complements = sum(member.num_complements for member in found)
    meeting = ONE_OF_ALL
    for member in found:
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
    """Raises TooManyMembersError for an intersection that would cost too much to follow.

    meeting: for each character, the product of the numbers of sets that its members have for it.
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
