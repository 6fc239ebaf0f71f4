"""Replaces look-ahead in regular expressions by intersections and complements.

A look-ahead is an additional condition on the rest of a text: a(?=b)c matches an "a" if the rest
matches both b.* and c. At the start of an anchored expression, it is a condition on the whole text.
Called by `translation`.
"""

import itertools

from quire.text.grammars.schemas.patterns.character_sets import ANY, Ranges
from quire.text.grammars.schemas.patterns.expressions import (
    Chain,
    Characters,
    Choice,
    Edge,
    Look,
    Node,
    Properties,
    Repeat,
    chained,
    written,
)
from quire.text.grammars.schemas.patterns.languages import NOTHING, Languages, Term

MAX_CONDITIONS = 8
"""Maximum number of expressions that replace one pattern; all of them must match the same text."""

_MAX_COPIES = 3
"""Maximum number of repetitions of a part that contains a look-ahead."""


def conditions(node: Node) -> list[str]:
    """Expressions in llguidance's syntax. A text contains a match of `node` if and only if it
    contains a match of each expression.

    Raises ValueError if `node` is unsupported or the result is too complex.
    """
    if not _has(node, Look):
        return [written(node)]
    parts = node.parts if isinstance(node, Chain) else (node,)
    # Only look-aheads at the start of an anchored expression can become separate expressions.
    if parts[0] != _START:
        return [_whole(node)]
    looks = list(itertools.takewhile(lambda part: isinstance(part, Look), parts[1:]))
    plain = [look for look in looks if isinstance(look, Look) and not _needs_automaton(look)]
    others = [look for look in looks if look not in plain]
    if len(looks) >= MAX_CONDITIONS:
        raise ValueError(f"it begins with more than {MAX_CONDITIONS - 1} look-aheads")
    found = [written(chained((_START, look.part))) for look in plain]
    tail = parts[1 + len(looks) :]
    return found + _shortest(others, tail)


_START = Edge(is_end=False)


def _needs_automaton(look: Look) -> bool:
    return look.is_negative or _has(look.part, Look)


def _shortest(looks: list[Node], tail: tuple[Node, ...]) -> list[str]:
    """Expressions for the look-aheads at the start and for the tail after them, joint or separate.

    A joint expression is often short, because the tail restricts it. It is preferred if it has at
    most twice the length of the separate ones, because the costs of separate expressions multiply
    in llguidance.
    """
    rest = chained((_START, *tail))
    together = chained((_START, *looks, *tail))
    if not looks:
        return [single(together)]
    try:
        each = [*(_whole(chained((_START, look))) for look in looks), single(rest)]
    except ValueError:
        return [_whole(together)]
    try:
        whole = _whole(together)
    except ValueError:
        return each
    return [whole] if len(whole) <= 2 * sum(map(len, each)) else each


def single(*nodes: Node) -> str:
    """One expression for the texts in which all nodes have a match. Raises ValueError like
    `conditions`."""
    if len(nodes) == 1 and not _has(nodes[0], Look):
        return written(nodes[0])
    return _whole(*nodes)


def _has(node: Node, *kinds: type) -> bool:
    if isinstance(node, kinds):
        return True
    if isinstance(node, Chain | Choice):
        return any(_has(part, *kinds) for part in node.parts)
    return isinstance(node, Repeat | Look) and _has(node.part, *kinds)


def _whole(*nodes: Node) -> str:
    """An expression that matches the whole text if all nodes have a match in it; NOTHING if no text
    does."""
    try:
        languages = Languages(ranges for node in nodes for ranges in _sets(node))
        reader = _TermReader(languages)
        found = languages.both([reader.found(node) for node in nodes])
        text = languages.expression(found)
    except RecursionError as error:
        raise ValueError("its look-ahead is too complex") from error
    return text if text == NOTHING else f"^(?:{text})$"


def _sets(node: Node) -> list[Ranges]:
    if isinstance(node, Characters):
        return [node.ranges]
    if isinstance(node, Chain | Choice):
        return [ranges for part in node.parts for ranges in _sets(part)]
    return _sets(node.part) if isinstance(node, Repeat | Look) else []


class _TermReader:
    """Converts syntax trees to terms of one `Languages`."""

    def __init__(self, languages: Languages) -> None:
        self._languages = languages

    def found(self, node: Node) -> Term:
        """The set of all texts that contain a match of `node`."""
        languages = self._languages
        at_start = self.texts(node, languages.anything, True)
        later = self.texts(node, languages.anything, False)
        some = languages.repeated(languages.characters(ANY), 1, None)
        return languages.choice((at_start, languages.joined(some, later)))

    def texts(self, node: Node, behind: Term, at_start: bool | None) -> Term:
        """The set of all matches of `node` followed by a text in `behind`. `at_start` is True if
        the match is at the start of the text, False if not, None if that depends on the text."""
        languages = self._languages
        match node:
            case Characters(ranges):
                return languages.joined(languages.characters(ranges), behind)
            case Chain(parts):
                starts = _starts(parts, at_start)
                for part, starts_here in zip(reversed(parts), reversed(starts), strict=True):
                    behind = self.texts(part, behind, starts_here)
                return behind
            case Choice(parts):
                return languages.choice([self.texts(part, behind, at_start) for part in parts])
            case Repeat(part, least, most):
                return self._repeated(part, least, most, behind, at_start)
            case Look(part, is_negative):
                ahead = self.texts(part, languages.anything, at_start)
                ahead = languages.without(ahead) if is_negative else ahead
                return languages.both((ahead, behind))
            case Edge(is_end):
                return self._edge(is_end, behind, at_start)
            case Properties():
                raise ValueError("\\p beside a look-ahead is not supported here")

    def _edge(self, is_end: bool, behind: Term, at_start: bool | None) -> Term:
        languages = self._languages
        if is_end:
            return languages.empty if languages.is_nullable(behind) else languages.nothing
        if at_start is None:
            raise ValueError("^ after a part that may be empty is not supported with look-ahead")
        return behind if at_start else languages.nothing

    def _repeated(
        self, part: Node, least: int, most: int | None, behind: Term, at_start: bool | None
    ) -> Term:
        languages = self._languages
        if not _has(part, Look, Edge):
            texts = self.texts(part, languages.empty, None)
            return languages.joined(languages.repeated(texts, least, most), behind)
        if most is None or most > _MAX_COPIES:
            raise ValueError("a look-ahead in a repeated part is not supported")
        result = behind
        for index in reversed(range(most)):
            starts_here = at_start if index == 0 else _behind(part, at_start)
            texts = self.texts(part, result, starts_here)
            result = texts if index < least else languages.choice((texts, behind))
        return result


def _starts(parts: tuple[Node, ...], at_start: bool | None) -> list[bool | None]:
    """`at_start` for each of the parts in sequence, if `at_start` applies to the first."""
    starts = []
    for part in parts:
        starts.append(at_start)
        at_start = _behind(part, at_start)
    return starts


def _behind(part: Node, at_start: bool | None) -> bool | None:
    if at_start is False or _least(part) > 0:
        return False
    return at_start if isinstance(part, Look | Edge) else None


def _least(node: Node) -> int:
    """A lower bound of the length of the node's matches, in characters."""
    match node:
        case Characters() | Properties():
            return 1
        case Chain(parts):
            return sum(map(_least, parts))
        case Choice(parts):
            return min(map(_least, parts))
        case Repeat(part, least, _):
            return least * _least(part)
        case Look() | Edge():
            return 0
