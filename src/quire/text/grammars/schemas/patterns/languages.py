"""Union, intersection and complement of sets of texts, converted to regular expressions.

llguidance's regular expressions have no complement. Here a set is a term, whose derivatives
(Brzozowski, 1964) are the states of an automaton. If the automaton has few states, it is converted
to a regular expression. Called by `lookahead`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS
from quire.text.grammars.schemas.patterns.character_sets import ANY, Ranges, class_text, union

MAX_SYMBOLS = 100
"""Maximum number of symbols (character classes) of one `Languages`."""

MAX_TERMS = 4_000
"""Maximum number of terms of one `Languages`; it bounds time and memory."""

MAX_STATES = 200
"""Maximum number of states of an automaton that is converted to an expression."""

_MAX_LABELS = 10_000
"""Maximum number of concatenations while an automaton is converted to an expression."""

NOTHING = class_text(())
"""The expression that matches no text."""

Term = int
"""A set of texts, as an index into a `Languages`."""


class Languages:
    """Terms for sets of texts. A symbol is a class of characters that no term distinguishes.

    Equal terms have the same index. Methods raise ValueError if there would be more than MAX_TERMS.
    """

    def __init__(self, sets: Iterable[Ranges]) -> None:
        """`sets` are all character sets that the terms will use."""
        self._symbols = _distinguished(set(sets))
        if len(self._symbols) > MAX_SYMBOLS:
            raise ValueError(f"it has look-ahead and more than {MAX_SYMBOLS} kinds of characters")
        self._terms: list[tuple[object, ...]] = []
        self._ids: dict[tuple[object, ...], Term] = {}
        self._is_nullable: list[bool] = []
        self._derived: dict[tuple[Term, int], Term] = {}
        self.nothing = self._term(("choice", ()), is_nullable=False)
        self.empty = self._term(("empty",), is_nullable=True)
        self.anything = self._term(("not", self.nothing), is_nullable=True)

    def characters(self, ranges: Ranges) -> Term:
        """The set of all texts of one character in `ranges`, which must be one of the `sets`."""
        inside = frozenset(
            index
            for index, symbol in enumerate(self._symbols)
            if any(first <= symbol[0][0] <= last for first, last in ranges)
        )
        return self._characters(inside)

    def _characters(self, inside: frozenset[int]) -> Term:
        return self._term(("in", inside), is_nullable=False) if inside else self.nothing

    def is_nullable(self, term: Term) -> bool:
        """True if the set contains the empty text."""
        return self._is_nullable[term]

    def joined(self, first: Term, second: Term) -> Term:
        """The set of all concatenations of a text of `first` and a text of `second`."""
        if self.nothing in (first, second):
            return self.nothing
        if first == self.empty:
            return second
        if second == self.empty:
            return first
        kind, *parts = self._terms[first]
        if kind == "joined":  # nested to the right, so that equal sets have equal terms
            return self.joined(parts[0], self.joined(parts[1], second))  # type: ignore[arg-type]
        is_nullable = self._is_nullable[first] and self._is_nullable[second]
        return self._term(("joined", first, second), is_nullable=is_nullable)

    def choice(self, terms: Iterable[Term]) -> Term:
        """The union of the sets."""
        parts: set[Term] = set()
        inside: frozenset[int] = frozenset()
        for term in self._flat("choice", terms):
            kind, *rest = self._terms[term]
            if kind == "in":
                inside |= rest[0]  # type: ignore[operator]
            else:
                parts.add(term)
        if self.anything in parts:
            return self.anything
        if inside:
            parts.add(self._characters(inside))
        if len(parts) == 1:
            return parts.pop()
        is_nullable = any(self._is_nullable[part] for part in parts)
        return self._term(("choice", tuple(sorted(parts))), is_nullable=is_nullable)

    def both(self, terms: Iterable[Term]) -> Term:
        """The intersection of the sets."""
        parts = set(self._flat("both", terms)) - {self.anything}
        if self.nothing in parts:
            return self.nothing
        if not parts:
            return self.anything
        if len(parts) == 1:
            return parts.pop()
        is_nullable = all(self._is_nullable[part] for part in parts)
        return self._term(("both", tuple(sorted(parts))), is_nullable=is_nullable)

    def _flat(self, kind: str, terms: Iterable[Term]) -> Iterable[Term]:
        for term in terms:
            own, *parts = self._terms[term]
            yield from parts[0] if own == kind else (term,)  # type: ignore[misc]

    def without(self, term: Term) -> Term:
        """The complement of the set."""
        kind, *parts = self._terms[term]
        if kind == "not":
            return parts[0]  # type: ignore[return-value]
        return self._term(("not", term), is_nullable=not self._is_nullable[term])

    def repeated(self, term: Term, least: int, most: int | None) -> Term:
        """The set of all concatenations of `least` to `most` texts of `term`; None means no upper
        bound."""
        if most == 0 or term == self.empty:
            return self.empty
        if term == self.nothing:
            return self.empty if least == 0 else self.nothing
        if (least, most) == (1, 1):
            return term
        is_nullable = least == 0 or self._is_nullable[term]
        return self._term(("repeated", term, least, most), is_nullable=is_nullable)

    def _term(self, term: tuple[object, ...], *, is_nullable: bool) -> Term:
        known = self._ids.get(term)
        if known is None:
            if len(self._terms) >= MAX_TERMS:
                raise ValueError("its look-ahead is too complex")
            known = self._ids[term] = len(self._terms)
            self._terms.append(term)
            self._is_nullable.append(is_nullable)
        return known

    def _derivative(self, term: Term, symbol: int) -> Term:
        """The set of the rests of those texts that begin with a character of class `symbol`."""
        known = self._derived.get((term, symbol))
        if known is None:
            known = self._derived[term, symbol] = self._derive(term, symbol)
        return known

    def _derive(self, term: Term, symbol: int) -> Term:
        match self._terms[term]:
            case ("in", frozenset() as inside):
                return self.empty if symbol in inside else self.nothing
            case ("joined", int(first), int(second)):
                behind = self.joined(self._derivative(first, symbol), second)
                if not self._is_nullable[first]:
                    return behind
                return self.choice((behind, self._derivative(second, symbol)))
            case ("choice", tuple(parts)):
                return self.choice([self._derivative(part, symbol) for part in parts])
            case ("both", tuple(parts)):
                return self.both([self._derivative(part, symbol) for part in parts])
            case ("not", int(inner)):
                return self.without(self._derivative(inner, symbol))
            case ("repeated", int(inner), int(least), most):
                left = None if most is None else most - 1  # type: ignore[operator]
                rest = self.repeated(inner, max(least - 1, 0), left)
                return self.joined(self._derivative(inner, symbol), rest)
            case _:
                return self.nothing

    def expression(self, term: Term) -> str:
        """A regular expression in llguidance's syntax that matches exactly the texts of the set.

        Raises ValueError if its automaton has more than MAX_STATES states.
        """
        states = {term: 0}
        moves: list[list[int]] = []
        pending = [term]
        for state in pending:  # the list grows during the loop
            targets = [self._derivative(state, symbol) for symbol in range(len(self._symbols))]
            for target in targets:
                if target not in states:
                    if len(states) >= MAX_STATES:
                        raise ValueError("its look-ahead has too many states")
                    states[target] = len(states)
                    pending.append(target)
            moves.append([states[target] for target in targets])
        accepting = [self._is_nullable[state] for state in pending]
        return _Automaton(moves, accepting, self._symbols).expression()


def _distinguished(sets: set[Ranges]) -> list[Ranges]:
    """Partition all characters into classes, each of which lies entirely inside or outside of each
    set."""
    edges = sorted(
        {edge for ranges in (ANY, *sets) for first, last in ranges for edge in (first, last + 1)}
    )
    groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for first, end in pairwise(edges):
        if any(start <= first <= last for start, last in ANY):
            key = tuple(any(start <= first <= last for start, last in ranges) for ranges in sets)
            groups.setdefault(key, []).append((first, end - 1))
    return [union(tuple(pairs)) for pairs in groups.values()]


class _Automaton:
    """A deterministic finite automaton with the start state 0."""

    def __init__(
        self, moves: list[list[int]], accepting: list[bool], symbols: Sequence[Ranges]
    ) -> None:
        #: self._moves[state][symbol] is the next state.
        self._moves = moves
        self._accepting = accepting
        self._symbols = symbols

    def _blocks(self) -> list[int]:
        """The block number of each state. States in one block accept the same texts (minimization
        by Moore, 1956)."""
        blocks = [int(is_accepting) for is_accepting in self._accepting]
        while True:
            ids: dict[tuple[int, ...], int] = {}
            refined = [
                ids.setdefault((blocks[state], *(blocks[to] for to in row)), len(ids))
                for state, row in enumerate(self._moves)
            ]
            if len(set(refined)) == len(set(blocks)):
                return refined
            blocks = refined

    def expression(self) -> str:
        """The regular expression of the automaton, by eliminating its states one by one. First come
        those that add the least text."""
        blocks = self._blocks()
        start, end = -1, -2
        labels: dict[tuple[int, int], _Text] = {(start, blocks[0]): _EMPTY}
        on: dict[tuple[int, int], list[Ranges]] = {}
        for state, row in enumerate(self._moves):
            if blocks.index(blocks[state]) == state:  # only the first state of each block
                for symbol, target in enumerate(row):
                    on.setdefault((blocks[state], blocks[target]), []).append(self._symbols[symbol])
                if self._accepting[state]:
                    labels[blocks[state], end] = _EMPTY
        labels |= {edge: _Text(class_text(union(*sets)), 2) for edge, sets in on.items()}
        left = set(blocks)
        num_labels = 0
        while left:
            weights = _weights(labels)
            state = min(left, key=lambda each: (weights[each], each))
            left.remove(state)
            num_labels += _eliminate_state(labels, state)
            if num_labels > _MAX_LABELS:
                raise ValueError("its look-ahead is too complex to be written as an expression")
        whole = labels.get((start, end))
        return NOTHING if whole is None else whole.text


class _Text:
    """A regular expression, and the precedence of its outermost operator."""

    __slots__ = ("level", "text")

    def __init__(self, text: str, level: int) -> None:
        if len(text) > MAX_EXPRESSION_CHARACTERS:
            raise ValueError("its look-ahead is too complex to be written as an expression")
        self.text = text
        #: 0 for alternatives, 1 for a sequence of parts, 2 for a single part.
        self.level = level

    def at_least(self, level: int) -> str:
        return self.text if self.level >= level else f"(?:{self.text})"


_EMPTY = _Text("", 1)


def _join(*texts: _Text) -> _Text:
    parts = [text for text in texts if text.text]
    if len(parts) == 1:
        return parts[0]
    return _Text("".join(text.at_least(1) for text in parts), 1)


def _either(first: _Text | None, second: _Text) -> _Text:
    if first is None or first.text == second.text:
        return second
    if not first.text or not second.text:
        return _Text((first if first.text else second).at_least(2) + "?", 2)
    return _Text(f"{first.text}|{second.text}", 0)


def _weights(labels: dict[tuple[int, int], _Text]) -> dict[int, int]:
    """For each state, an estimate of the length of text that its elimination would add."""
    num_in, num_out, lengths = Counter[int](), Counter[int](), Counter[int]()
    for (start, to), text in labels.items():
        num_out[start] += 1
        num_in[to] += 1
        for state in (start, to):
            lengths[state] += len(text.text) + 1
    return {state: length * num_in[state] * num_out[state] for state, length in lengths.items()}


def _eliminate_state(labels: dict[tuple[int, int], _Text], state: int) -> int:
    """Replace `state` by edges that join each edge into it with each edge out of it. Returns the
    number of joined edges."""
    loop = labels.pop((state, state), _EMPTY)
    again = _Text(loop.at_least(2) + "*", 2) if loop.text else _EMPTY
    into = {start: labels.pop((start, to)) for start, to in list(labels) if to == state}
    out = {to: labels.pop((start, to)) for start, to in list(labels) if start == state}
    for start, before in into.items():
        for to, behind in out.items():
            labels[start, to] = _either(labels.get((start, to)), _join(before, again, behind))
    return len(into) * len(out)
