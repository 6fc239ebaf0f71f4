"""Splits a Lark grammar into definitions, and their bodies into tokens.

Tokens that don't matter for intersections are dropped. Invalid text is tolerated, since llguidance
finds errors when it compiles the grammar.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from json import JSONDecoder

_TOKEN = re.compile(
    r"""
      (?P<skipped>//[^\n]*|\#[^\n]*|[ \t\r\n]+|%[a-z_]+|->\s*\w+)
    | (?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
    | (?P<literal>"(?:\\.|[^"\\])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<head>[!?]*_*[A-Za-z][\w-]*(?:::\w+)?[ \t]*(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:(?!:))
    | (?P<name>[!?]*_*[A-Za-z][\w-]*)
    | (?P<special><[^<>\s]+>)
    | (?P<repetition>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\}|[*+?])
    | (?P<negation>~)
    | (?P<and>&)
    | (?P<or>\|)
    | (?P<open>[(\[])
    | (?P<close>[)\]])
    """,
    re.VERBOSE | re.DOTALL,
)
_IGNORED = frozenset({"skipped", "repetition", "special"})
_JSON = re.compile(r"%(?:json|regex|llguidance)\s*(?=[{\[\"tf])")


@dataclass(slots=True)
class Definition:
    """The definition of one rule or terminal."""

    name: str
    #: (kind, text) of each token of the body. Kinds are literal, regex (also for ranges; flags as a
    #: (?i) prefix), name, negation, and, or, open, close.
    tokens: list[tuple[str, str]] = field(default_factory=list)
    #: The names of the terminals that the body refers to.
    references: set[str] = field(default_factory=set)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def definitions(grammar: str) -> Iterable[Definition]:
    """All definitions in a grammar, including those in nested grammars; JSON is skipped. If two
    nested grammars define the same name, it gets the alternatives of both."""
    found: dict[str, Definition] = {}
    current: Definition | None = None
    at = 0
    while at < len(grammar):
        json = _JSON.match(grammar, at)
        if json is not None:
            at = _json_end(grammar, json.end())
            continue
        token = _TOKEN.match(grammar, at)
        if token is None:
            at += 1
            continue
        at = token.end()
        kind = str(token.lastgroup)
        if kind == "head":
            name = re.split(r"[\s:\[.]", token[0].lstrip("!?"))[0]
            current = found.setdefault(name, Definition(name))
            if current.tokens:
                current.tokens.append(("or", "|"))
        elif current is not None and kind not in _IGNORED:
            _add(current, kind, token[0])
    return found.values()


def _add(definition: Definition, kind: str, text: str) -> None:
    if kind == "regex":
        body, _, flags = text[1:].rpartition("/")
        text = f"(?{flags}){body}" if flags else body
    elif kind == "range":
        kind, text = "regex", "[{}-{}]".format(*re.findall(r'"(\\.|[^"])', text))
    elif kind == "literal" and text.endswith("i"):
        kind, text = "regex", f"(?i){re.escape(text[1:-2])}"
    if kind == "name" and _is_terminal(text):
        definition.references.add(text)
    definition.tokens.append((kind, text))


def _json_end(grammar: str, at: int) -> int:
    try:
        return JSONDecoder().raw_decode(grammar, at)[1]
    except (ValueError, RecursionError):
        return at + 1
