"""Matches paths of linears with patterns of PEFT's configs, in linear time.

PEFT asks for each linear which pattern is the first that matches the end of its path, as `re` does
with `(.*\\.)?(pattern)$`. `re` goes back and tries again, under the interpreter's lock: a pattern
like `(([a-z])*)*!` stops a whole process for hours. Here all patterns are one automaton (Thompson,
CACM 1968), of which every character of a path moves a set of states once. Python's own parser reads
the patterns, so they mean what they mean in `re`. What no automaton can match is refused by name:
references to groups, look-around, atomic groups; flags are refused, too.

Called by `peft_folder`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_CHARACTERS = 2000
MAX_STATES = 100_000
"""Of all patterns together. 1,000 linears, each by its full path, have 50,000."""
MAX_VISITS = 5_000_000
"""Of states and of the entries of their sets of characters, in all calls together: some seconds."""

_REFUSED = {
    _constants.GROUPREF: "a reference to a group",
    _constants.GROUPREF_EXISTS: "a condition on a group",
    _constants.ASSERT: "look-around",
    _constants.ASSERT_NOT: "look-around",
    _constants.FAILURE: "look-around",
    _constants.ATOMIC_GROUP: "an atomic group",
    _constants.POSSESSIVE_REPEAT: "a possessive repetition",
}
_BEGINNINGS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_ENDS = (_constants.AT_END, _constants.AT_END_STRING)


class PatternError(ValueError):
    """Says why patterns are refused, in words that follow the pattern. pattern: the refused one;
    None: it is no single one."""

    def __init__(self, why: str, pattern: str | None = None) -> None:
        super().__init__(why)
        self.pattern = pattern


@dataclass(slots=True)
class _State:
    """At most one of the four has a value; a state without any leads nowhere.

    items: one of these takes a character, and leads to `following`; see `_takes`. at: leads to
        `following` where this is true of the position. splits: leads to all of these.
    match: the number of the pattern that ends here.
    """

    items: Sequence[Any] | None = None
    at: Any = None
    splits: list[int] = field(default_factory=list)
    match: int | None = None
    following: int = 0


class PathPatterns:
    """Patterns in order. Invariant: states are never removed, and each lead to states that are
    there. The same object may not be used by two threads at once."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises PatternError for the first pattern that can't be taken."""
        self._states: list[_State] = []
        self._num_visits = 0
        # (states, what was before, the next character) -> the states behind that character
        self._moves: dict[tuple[frozenset[int], str | None, str], frozenset[int]] = {}
        entries = [self._pattern(index, text) for index, text in enumerate(patterns)]
        ends_word = self._add(_State(splits=entries))
        loop = self._add(_State())
        anything = self._add(_State([(_constants.ANY, None)], following=loop))
        dot = self._add(_State([(_constants.LITERAL, ord("."))], following=ends_word))
        self._states[loop].splits = [anything, dot]
        self._start = frozenset((ends_word, loop))

    def first(self, path: str) -> int | None:
        """The number of the first pattern that matches the end of a path, from its beginning or
        from behind a dot; None: none does. path: without line breaks. Raises PatternError where
        all that was asked for has taken too long."""
        states, before = self._start, None
        for letter in path:
            key = states, before, letter
            moved = self._moves.get(key)
            if moved is None:
                moved = self._moves[key] = self._move(states, before, letter)
            states, before = moved, letter
        reached = (self._states[each] for each in self._closure(states, before, None))
        return min((each.match for each in reached if each.match is not None), default=None)

    def _move(self, states: frozenset[int], before: str | None, letter: str) -> frozenset[int]:
        following: set[int] = set()
        for each in self._closure(states, before, letter):
            state = self._states[each]
            if state.items is not None:
                self._visit(len(state.items))
                if _takes(state.items, letter):
                    following.add(state.following)
        return frozenset(following)

    def _closure(
        self, states: Iterable[int], before: str | None, following: str | None
    ) -> set[int]:
        """All states that are reached without a character. before, following: those around; None:
        there is none."""
        found, waiting = set(states), list(states)
        while waiting:
            state = self._states[waiting.pop()]
            reached = state.splits
            if state.at is not None and _holds(state.at, before, following):
                reached = [state.following]
            new = [each for each in reached if each not in found]
            found.update(new)
            waiting += new
        self._visit(len(found))
        return found

    def _visit(self, number: int) -> None:
        self._num_visits += number
        if self._num_visits > MAX_VISITS:
            raise PatternError("take too many steps to match")

    # ---- making states, from the last one to the first --------------------------------------

    def _pattern(self, index: int, text: str) -> int:
        """The first state of a pattern."""
        try:
            if len(text) > MAX_PATTERN_CHARACTERS:
                raise PatternError(f"is longer than {MAX_PATTERN_CHARACTERS} characters")
            parsed = _parser.parse(text)
            if parsed.state.flags != re.UNICODE:
                raise PatternError("has flags, which are not served")
            return self._sequence(parsed, self._add(_State(match=index)))
        except PatternError as error:
            raise PatternError(str(error), text) from None
        except (re.error, ValueError, OverflowError, RecursionError):
            raise PatternError("is no regular expression", text) from None

    def _sequence(self, parsed: Iterable[Any], following: int) -> int:
        for kind, value in reversed(list(parsed)):
            following = self._item(kind, value, following)
        return following

    def _item(self, kind: Any, value: Any, following: int) -> int:
        if kind in _REFUSED:
            raise PatternError(f"has {_REFUSED[kind]}, which is not served")
        if kind is _constants.AT:
            return self._add(_State(at=value, following=following))
        if kind is _constants.BRANCH:
            return self._add(
                _State(splits=[self._sequence(branch, following) for branch in value[1]])
            )
        if kind is _constants.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise PatternError("has flags, which are not served")
            return self._sequence(inner, following)
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, following)
        items = value if kind is _constants.IN else [(kind, value)]
        return self._add(_State(items, following=following))

    def _repeat(self, least: int, most: int, inner: Any, following: int) -> int:
        entry = following
        if most == _constants.MAXREPEAT:
            entry = self._add(_State(splits=[following]))
            self._states[entry].splits.append(self._sequence(inner, entry))
        else:
            for _ in range(most - least):
                once_more = self._sequence(inner, entry)
                entry = self._add(_State(splits=[once_more, following]))
        for _ in range(least):
            before = self._sequence(inner, entry)
            if before == entry:  # of nothing
                break
            entry = before
        return entry

    def _add(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise PatternError("repeats too much, or there are too many patterns")
        self._states.append(state)
        return len(self._states) - 1


def _takes(items: Sequence[Any], letter: str) -> bool:
    """Whether a set of characters, as the parser gives it, has this one."""
    is_negated = items[0][0] is _constants.NEGATE
    return is_negated != any(_is_one(kind, value, letter) for kind, value in items[is_negated:])


def _is_one(kind: Any, value: Any, letter: str) -> bool:
    if kind is _constants.LITERAL:
        return bool(ord(letter) == value)
    if kind is _constants.NOT_LITERAL:
        return bool(ord(letter) != value)
    if kind is _constants.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    if kind is _constants.ANY:
        return letter != "\n"
    assert kind is _constants.CATEGORY, kind
    is_one = _CATEGORIES.get(value)
    if is_one is not None:
        return is_one(letter)
    return not _CATEGORIES[_OPPOSITES[value]](letter)


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


_CATEGORIES = {
    _constants.CATEGORY_DIGIT: str.isdecimal,
    _constants.CATEGORY_SPACE: str.isspace,
    _constants.CATEGORY_WORD: _is_word,
}
_OPPOSITES = {
    _constants.CATEGORY_NOT_DIGIT: _constants.CATEGORY_DIGIT,
    _constants.CATEGORY_NOT_SPACE: _constants.CATEGORY_SPACE,
    _constants.CATEGORY_NOT_WORD: _constants.CATEGORY_WORD,
}


def _holds(at: Any, before: str | None, following: str | None) -> bool:
    """Whether a position between two characters is what the parser calls `at`."""
    if at in _BEGINNINGS:
        return before is None
    if at in _ENDS:
        return following is None
    is_boundary = _ends_word(before) != _ends_word(following)
    return is_boundary == (at is _constants.AT_BOUNDARY)


def _ends_word(letter: str | None) -> bool:
    return letter is not None and _is_word(letter)
