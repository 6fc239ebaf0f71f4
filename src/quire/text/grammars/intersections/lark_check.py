"""Refuses Lark grammars with intersections of terminals that would cost too much."""

import contextlib
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from quire.text.grammars.intersections.lark_tokens import definitions
from quire.text.grammars.intersections.regex_sets import literal_set, regex_sets
from quire.text.grammars.intersections.set_counts import (
    IMPORTED,
    NOTHING,
    SetCount,
    complement,
    either,
    intersection,
)


def check_lark(grammar: str) -> None:
    """Raises TooManyMembersError if an intersection of terminals would cost too much.

    Follows references between terminals, except circular ones, which llguidance refuses. Called by
    `grammar_text`.
    """
    if "&" not in grammar and "~" not in grammar:
        return
    found = {each.name: each for each in definitions(grammar)}
    order = TopologicalSorter({each.name: each.references for each in found.values()})
    known: dict[str, SetCount] = {}
    with contextlib.suppress(CycleError):
        order.prepare()
    while names := order.get_ready():  # terminals that depend on no circular reference
        for name in names:
            known[name] = IMPORTED
            if name in found:
                known[name] = _BodyCounter(known).read(found[name].tokens)
        order.done(*names)


class _Brackets:
    """The part of a definition, or of a bracketed group, that has been read so far."""

    __slots__ = ("alternatives", "is_negated", "members", "parts")

    def __init__(self, is_negated: bool = False) -> None:
        #: The alternatives that are complete.
        self.alternatives: list[SetCount] = []
        #: The complete members of the current alternative, which is an intersection.
        self.members: list[SetCount] = []
        #: The parts of the current member, in order.
        self.parts: list[SetCount] = []
        self.is_negated = is_negated

    def end_member(self) -> None:
        self.members.append(either(self.parts))
        self.parts = []

    def end_alternative(self) -> None:
        self.end_member()
        self.alternatives.append(intersection(self.members))
        self.members = []

    def close(self) -> SetCount:
        self.end_alternative()
        return either(self.alternatives)


class _BodyCounter:
    """Counts the character sets in the body of one definition. Does not recurse, since brackets may
    nest thousands deep."""

    def __init__(self, known: dict[str, SetCount]) -> None:
        self._known = known
        self._groups = [_Brackets()]
        self._is_negated = False

    def read(self, tokens: Iterable[tuple[str, str]]) -> SetCount:
        """The `SetCount` of a body. `tokens` are pairs of kind and text; see
        `lark_tokens.Definition`."""
        for kind, text in tokens:
            if kind == "negation":
                self._is_negated = not self._is_negated
            elif kind == "open":
                self._groups.append(_Brackets(self._is_negated))
                self._is_negated = False
            elif kind == "close" and len(self._groups) > 1:
                group = self._groups.pop()
                self._add(group.close(), group.is_negated)
            elif kind == "or":
                self._groups[-1].end_alternative()
            elif kind == "and":
                self._groups[-1].end_member()
            else:
                self._add(self._value(kind, text), self._is_negated)
                self._is_negated = False
        while len(self._groups) > 1:  # unclosed brackets, which llguidance refuses
            group = self._groups.pop()
            self._add(group.close(), group.is_negated)
        return self._groups[0].close()

    def _value(self, kind: str, text: str) -> SetCount:
        if kind == "name":
            return self._known.get(text, NOTHING)
        return SetCount(literal_set(text) if kind == "literal" else regex_sets(text))

    def _add(self, count: SetCount, is_negated: bool) -> None:
        self._groups[-1].parts.append(complement(count) if is_negated else count)
