"""Grammars of values that a model writes as bare text, from their JSON schemas.

What the text becomes is decided by `argument_types`; here it is made sure that it is valid.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.lark import literal
from quire.text.parsers.call_forms import TaggedForm
from quire.text.parsers.grammars.remembered_terms import json_term, style_of
from quire.text.parsers.grammars.rules import ANY_TEXT, Rules
from quire.text.parsers.grammars.value_rules import SILENT_KEYWORDS, UnwritableError
from quire.text.parsers.reading.argument_types import ArgumentTypes, Json

_LENGTHS = frozenset({"minLength", "maxLength"})
_MAX_CHOICES = 1_000
_MAX_DEPTH = 8


class TextValues:
    """Writes the values of one tool's arguments, and the mark behind each.

    Invariant: no value has the mark in it.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], form: TaggedForm) -> None:
        self._rules = rules
        self._root = root
        self._types = ArgumentTypes(root)
        self._style = style_of(form)
        self._words = ("True", "False") if form.has_python_words else None
        self._space = form.value_space
        self._mark = form.parameter_end.strip()

    def value(self, key: str, schema: Json, origin: str) -> str:
        """A term for an argument's value and the mark behind it. Raises UnwritableError."""
        types = self._types.of(key)
        if self._words and types == {"boolean"} and self._is_plain(schema, 0):
            words = self._rules.any_of(map(literal, self._words))
            return f"{words} {self._rules.tokens.terms(self._space + self._mark)}"
        if "string" not in types:
            return self._json(schema, origin)
        if self._is_plain(schema, _MAX_DEPTH):
            return self.any_text()
        choices = self._choices(schema, _MAX_DEPTH)
        if choices is not None:
            return self._one_of(key, choices)
        resolved = self._types.resolved(schema)
        if resolved.get("type") == "string" and set(resolved) <= SILENT_KEYWORDS | _LENGTHS:
            least, most = resolved.get("minLength", 0), resolved.get("maxLength", "")
            return self._text(f"/(?s:.{{{least},{most}}})/")
        unknown = sorted(set(resolved) - SILENT_KEYWORDS - _LENGTHS - {"type"}) or ["type"]
        raise UnwritableError(f"{key}: {unknown[0]} is not supported for a value that may be text")

    def any_text(self) -> str:
        """A term for any text, and the mark."""
        return self._text(ANY_TEXT)

    def _text(self, pattern: str) -> str:
        rules = self._rules
        if rules.tokens.is_special(self._mark):
            text = rules.add(
                "TEXT", f"{pattern} {literal(self._space)}" if self._space else pattern
            )
            return f"{text} {rules.tokens.terms(self._mark)}"
        text = rules.add("TEXT", f"{pattern} & {rules.without([self._mark])}")
        return rules.add("value", f"{text} {literal(self._space + self._mark)}", "lazy")

    def _json(self, schema: Json, origin: str) -> str:
        definitions = {
            name: self._root[name] for name in ("$defs", "definitions") if name in self._root
        }
        try:
            term = json_term({**definitions, **schema}, origin, self._style)
        except InvalidRequestError as error:
            raise UnwritableError(str(error)) from error
        return f"{term} {self._rules.tokens.terms(self._space + self._mark)}"

    def _is_plain(self, schema: Json, depth: int) -> bool:
        """Whether the schema asks for nothing but types, so that every text is valid."""
        resolved = self._types.resolved(schema)
        for key in ("anyOf", "oneOf"):
            branches = resolved.get(key)
            if depth and isinstance(branches, list) and set(resolved) <= SILENT_KEYWORDS | {key}:
                return all(self._is_plain(each, depth - 1) for each in branches)
        return set(resolved) <= SILENT_KEYWORDS | {"type"}

    def _choices(self, schema: Json, depth: int) -> list[Json] | None:
        """All values, where there are few of them."""
        resolved = self._types.resolved(schema)
        if not set(resolved) <= SILENT_KEYWORDS | {"type", "enum", "const", "anyOf", "oneOf"}:
            return None
        if "const" in resolved:
            return [resolved["const"]]
        if isinstance(resolved.get("enum"), list):
            return list(resolved["enum"])
        if resolved.get("type") == "null":
            return [None]
        if resolved.get("type") == "boolean":
            return [True, False]
        found: list[Json] = []
        branches = resolved.get("anyOf") or resolved.get("oneOf") or ()
        for each in branches:
            choices = self._choices(each, depth - 1) if depth else None
            if choices is None:
                return None
            found += choices
        return found or None

    def _one_of(self, key: str, choices: list[Json]) -> str:
        """Those of the values that are read back as what they are."""
        if len(choices) > _MAX_CHOICES:
            raise UnwritableError(f"{key}: enum has more than {_MAX_CHOICES} values")
        texts = []
        for value in choices:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            read = self._types.as_json(key, text)
            if self._mark not in text and json.loads(read) == value:
                texts.append(text)
        if not texts:
            raise UnwritableError(f"{key}: none of its values can be written as text")
        end = self._rules.tokens.terms(self._space + self._mark)
        return f"{self._rules.any_of(map(literal, texts))} {end}"
