"""Sets of characters as ranges of code points, and their syntax in llguidance's regexes."""

from collections.abc import Sequence

Ranges = tuple[tuple[int, int], ...]
"""(first, last) code points of each range: sorted, disjoint, and without surrogates."""

_LAST_BEFORE_SURROGATES, _FIRST_BEHIND_SURROGATES, _LAST = 0xD7FF, 0xE000, 0x10FFFF

ANY: Ranges = ((0, _LAST_BEFORE_SURROGATES), (_FIRST_BEHIND_SURROGATES, _LAST))
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
SPACES: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)

_SPECIAL = frozenset(r"\^$.*+?()[]{}|/-&~#")


def union(*sets: Ranges) -> Ranges:
    """The union of the sets; the ranges of an argument may be unsorted."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pair for ranges in sets for pair in ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return complement(complement(tuple(joined)))


def complement(ranges: Ranges) -> Ranges:
    """The set of all other characters."""
    gaps: list[tuple[int, int]] = []
    for start, end in ANY:
        for first, last in ranges:
            if first > end:
                break
            if first > start:
                gaps.append((start, first - 1))
            start = max(start, last + 1)
        if start <= end:
            gaps.append((start, end))
    return tuple(gaps)


def class_text(ranges: Ranges, properties: Sequence[str] = (), *, is_negated: bool = False) -> str:
    """The class `ranges` in llguidance's syntax; a single character is written without brackets.
    `properties` are Unicode properties that the class also includes."""
    if properties:
        return f"[{'^' * is_negated}{_members(ranges)}{''.join(properties)}]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    positive, negative = _members(ranges), _members(complement(ranges))
    if not negative:
        return r"[\x00-\x{10ffff}]"
    is_shorter = not positive or len(negative) < len(positive)
    return f"[^{negative}]" if is_shorter else f"[{positive}]"


def _members(ranges: Ranges) -> str:
    parts: list[str] = []
    pairs = list(ranges)
    for index, (first, last) in enumerate(pairs):
        if index and first == _FIRST_BEHIND_SURROGATES and pairs[index - 1][1] == first - 0x801:
            continue  # the previous range was extended across the surrogates
        if last == _LAST_BEFORE_SURROGATES and index + 1 < len(pairs):
            following = pairs[index + 1]
            last = following[1] if following[0] == _FIRST_BEHIND_SURROGATES else last
        parts.append(_escaped(first))
        if last > first:
            parts.append(("-" if last > first + 1 else "") + _escaped(last))
    return "".join(parts)


def _escaped(code: int) -> str:
    character = chr(code)
    if character in _SPECIAL:
        return "\\" + character
    return character if 0x21 <= code < 0x7F else f"\\x{{{code:x}}}"
