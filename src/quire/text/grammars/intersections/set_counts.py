"""Counts the character sets of expressions, and bounds what intersections of these cost.

llguidance follows an intersection by comparing each character set of one member with each of every
other member, and looks at its fuel only afterwards. The pairs multiply: 13 members of two sets each
kept it busy for seconds, three of 400 sets for a minute with gigabytes. So the number of members
and the product of their sets are bounded here. A complement is followed one set at a time and
multiplies nothing. Called by `lark_check`, and for schemas by `schemas.intersected_strings`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

MAX_MEMBERS = 8
"""Of one intersection, complements not counted. Rules for passwords have four or five."""

MAX_COMPARISONS = 2_500
"""Product of the numbers of character sets of an intersection's members. A member of a rule for
passwords has three; each intersection within this bound was followed in 0.1 s at most."""

MAX_COMPLEMENTS = 64
"""Of one intersection: each is compared with all others at every character."""

MAX_COMPLEMENT_SETS = 1_000
"""Character sets in one complement: every two are compared."""

LITERAL = "literal"
"""Stands for all single characters of an expression: they exclude each other, as one set would."""


class TooManyMembersError(ValueError):
    """Says what there is too much of in an intersection, and how much there may be."""


@dataclass(frozen=True, slots=True)
class SetCount:
    """Which character sets an expression has.

    sets: those written in it, by their text. num_others: upper bound on further ones, which
    intersections in it make. num_members, num_complements: of the intersection that it is, to be
    added up where it is a member of another one. negated: what it is the complement of, if it is.
    """

    sets: frozenset[str] = frozenset()
    num_others: int = 0
    num_members: int = 1
    num_complements: int = 0
    negated: "SetCount | None" = None

    @property
    def total(self) -> int:
        """How many sets it has, at least one."""
        return max(1, len(self.sets) + self.num_others)


NOTHING = SetCount(num_members=0)
"""Of an expression without characters."""


IMPORTED = SetCount(num_others=4)
"""Of a terminal that is defined elsewhere: `%import common.NUMBER`."""


def either(parts: Iterable[SetCount]) -> SetCount:
    """The count of alternatives, or of parts that follow one another."""
    found = [part for part in parts if part != NOTHING]
    if len(found) == 1:
        return found[0]
    if not found:
        return NOTHING
    return SetCount(
        frozenset().union(*(part.sets for part in found)), sum(part.num_others for part in found)
    )


def complement(of: SetCount) -> SetCount:
    """The count of what `of` does not match. Raises TooManyMembersError."""
    if of.negated is not None:
        return of.negated
    if of.total > MAX_COMPLEMENT_SETS:
        raise TooManyMembersError(
            f"a complement (~) has {of.total} different character classes in it; it may have up to"
            f" {MAX_COMPLEMENT_SETS}"
        )
    return SetCount(num_others=1, num_members=0, num_complements=1, negated=of)


def intersection(members: Iterable[SetCount]) -> SetCount:
    """The count of what all members match. Raises TooManyMembersError."""
    found = [member for member in members if member != NOTHING]
    if len(found) == 1:
        return found[0]
    num_members = sum(member.num_members for member in found)
    num_complements = sum(member.num_complements for member in found)
    num_comparisons = prod(member.total for member in found)
    check_intersection(num_members, num_comparisons)
    if num_complements > MAX_COMPLEMENTS:
        raise TooManyMembersError(
            f"an intersection has {num_complements} complements (~); it may have up to"
            f" {MAX_COMPLEMENTS}: write what they exclude as the alternatives of one"
        )
    return SetCount(frozenset(), num_comparisons, num_members, num_complements)


def check_intersection(num_members: int, num_comparisons: int) -> None:
    """Raises TooManyMembersError for an intersection that would cost too much to follow.

    num_comparisons: the product of its members' sets.
    """
    if num_members > MAX_MEMBERS:
        raise TooManyMembersError(
            f"{num_members} expressions must match the same text; up to {MAX_MEMBERS} may: join"
            " some of them into one"
        )
    if num_comparisons > MAX_COMPARISONS:
        raise TooManyMembersError(
            "expressions that must match the same text have too many different character classes"
            f" together: their numbers multiply to {num_comparisons}, and may to {MAX_COMPARISONS};"
            " use fewer classes, or fewer expressions"
        )


def regex_sets(regex: str) -> SetCount:
    """The count of a regular expression: its classes, dots and escapes for classes."""
    found: set[str] = set()
    at = 0
    while at < len(regex):
        end = _part_end(regex, at)
        part = regex[at:end]
        if part[0] in ".[" or re.match(r"\\[pPdDwWsS]", part):
            found.add(part)
        elif part[0] not in "^$()|*+?{":
            found.add(LITERAL)
        at = end
    if "." in found and "(?" in regex:  # a flag may change what a dot is in a part of it
        found.add("other dot")
    return SetCount(frozenset(found))


def _part_end(regex: str, at: int) -> int:
    """Where the class, the escape or the character ends that begins there."""
    if regex[at] == "\\":
        escape = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|[\s\S]|\Z)").match(regex, at)
        return escape.end() if escape is not None else at + 1
    if regex[at] == "{":
        count = re.compile(r"\{\d*,?\d*\}").match(regex, at)
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
