"""Matches regular expressions of PEFT's configs with paths of linears, in linear time.

For each linear, PEFT looks for the first pattern that matches the end of its path, as `re` does
with `(.*\\.)?(pattern)$`. `re` backtracks while it holds the interpreter's lock: a pattern such as
`(([a-z])*)*!` stops a whole process for hours. Here all patterns are one automaton (Thompson, CACM
1968), and the automaton updates its set of states once per character of a path. Python's own parser
reads the patterns, so they mean the same as in `re`. Features that an automaton can't match are
refused by
name: references to groups, look-around, atomic groups. Flags are refused, too.

Called by `peft_folder`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_CHARACTERS = 2000
MAX_STATES = 100_000
"""Maximum number of states of all patterns together. The full paths of 1,000 linears need
50,000."""
MAX_VISITS = 5_000_000
"""Maximum total of states and character-set entries that all calls visit. It takes some seconds."""

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
    """A pattern is refused. The message is the reason, as a predicate: "has flags"."""

    def __init__(self, why: str, pattern: str | None = None) -> None:
        super().__init__(why)
        #: The refused pattern; None if all patterns together are refused.
        self.pattern = pattern


@dataclass(slots=True)
class _State:
    """A state of the automaton. At most one of the first four fields is set."""

    #: The set of characters that lead to `following`; see `_takes`.
    items: Sequence[Any] | None = None
    #: The condition on the position, such as a word boundary, that leads to `following`.
    at: Any = None
    #: States that are reached from here without a character.
    splits: list[int] = field(default_factory=list)
    #: The index of the pattern that matches if the path ends in this state; None for other states.
    match: int | None = None
    following: int = 0


class PathPatterns:
    """An automaton of ordered patterns, for one thread at a time.

    Invariant: states are never removed, and lead to existing states.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises PatternError for the first unsupported pattern."""
        self._states: list[_State] = []
        self._num_visits = 0
        #: A cache of the next set of states, by the current set, the previous character and the
        #: character that is read.
        self._moves: dict[tuple[frozenset[int], str | None, str], frozenset[int]] = {}
        entries = [self._pattern(index, text) for index, text in enumerate(patterns)]
        # A pattern may follow any text that ends with a dot, as if preceded by `(.*\.)?`.
        ends_word = self._add(_State(splits=entries))
        loop = self._add(_State())
        anything = self._add(_State([(_constants.ANY, None)], following=loop))
        dot = self._add(_State([(_constants.LITERAL, ord("."))], following=ends_word))
        self._states[loop].splits = [anything, dot]
        self._start = frozenset((ends_word, loop))

    def first(self, path: str) -> int | None:
        """The index of the first pattern that matches the whole path, or the part after one of its
        dots.

        None if no pattern matches. The path has no line breaks. Raises PatternError if all calls
        together have taken too many steps.
        """
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
        """All states that can be reached from `states` without reading a character.

        `before` and `following` are the characters around the position; None at an end of the path.
        """
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

    # ---- making states, from the last to the first ------------------------------------------

    def _pattern(self, index: int, text: str) -> int:
        """Add the states of a pattern. Returns the index of its first state."""
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
            if before == entry:  # the repeated pattern is empty
                break
            entry = before
        return entry

    def _add(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise PatternError("repeats too much, or there are too many patterns")
        self._states.append(state)
        return len(self._states) - 1


def _takes(items: Sequence[Any], letter: str) -> bool:
    """Whether a set of characters, in the parser's format, contains `letter`."""
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
    """Whether the position between two characters fulfils the parser's condition `at`."""
    if at in _BEGINNINGS:
        return before is None
    if at in _ENDS:
        return following is None
    is_boundary = _ends_word(before) != _ends_word(following)
    return is_boundary == (at is _constants.AT_BOUNDARY)


def _ends_word(letter: str | None) -> bool:
    return letter is not None and _is_word(letter)
