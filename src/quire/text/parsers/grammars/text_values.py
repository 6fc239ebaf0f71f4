"""Writes grammar rules for argument values that a model writes as unquoted text.

`argument_types` converts such text to JSON; these rules make sure that the value obeys its JSON
schema. A term is an expression in the body of a grammar rule.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.lark import literal
from quire.text.parsers.call_forms import TaggedForm
from quire.text.parsers.grammars.remembered_terms import json_term, style_of
from quire.text.parsers.grammars.rules import ANY_TEXT, Rules
from quire.text.parsers.grammars.value_rules import UnwritableError, check_exclusive
from quire.text.parsers.reading.argument_types import ArgumentTypes, Json, is_of_types

_LENGTHS = frozenset({"minLength", "maxLength"})
_MAX_CHOICES = 1_000
_MAX_DEPTH = 8


class TextValues:
    """Writes rules for the argument values of one tool. Each ends with the mark after a value.

    `root` is the supported part of the tool's schema. Invariant: no allowed value contains the
    mark.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], form: TaggedForm) -> None:
        self._rules = rules
        self._root = root
        self._types = ArgumentTypes(root)
        self._style = style_of(form)
        self._words = ("True", "False") if form.has_python_words else None
        self._space = form.value_space
        self._mark = form.parameter_end.strip()

    def value(self, key: str, schema: Json) -> str:
        """A term for an argument's value and the mark after it. Raises UnwritableError."""
        types = self._types.of(key)
        if self._words and types == {"boolean"} and self._is_plain(schema, 0):
            words = self._rules.any_of(map(literal, self._words))
            return f"{words} {self._rules.tokens.terms(self._space + self._mark)}"
        if "string" not in types:
            return self._json(schema)
        if self._is_plain(schema, _MAX_DEPTH):
            return self.any_text()
        choices = self._choices(schema, _MAX_DEPTH)
        if choices is not None:
            return self._one_of(key, choices)
        resolved = self._resolved(schema)
        if resolved.get("type") == "string" and set(resolved) <= _LENGTHS | {"type"}:
            least, most = resolved.get("minLength", 0), resolved.get("maxLength", "")
            if most != "" and least > most:
                raise UnwritableError(f"{key}: minLength is above maxLength")
            return self._text(f"/(?s:.{{{least},{most}}})/")
        unknown = sorted(set(resolved) - _LENGTHS - {"type"}) or ["type"]
        raise UnwritableError(f"{key}: {unknown[0]} is not supported for a value that may be text")

    def any_text(self) -> str:
        """A term for any text and the mark after it."""
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

    def _json(self, schema: Mapping[str, Any]) -> str:
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        try:
            term = json_term({**definitions, **schema}, "", self._style, is_loose=False)
        except InvalidRequestError as error:
            raise UnwritableError(str(error).removeprefix(": ")) from error
        return f"{term} {self._rules.tokens.terms(self._space + self._mark)}"

    def _is_plain(self, schema: Json, depth: int) -> bool:
        """True if the schema constrains only types, so that any text is valid."""
        resolved = self._resolved(schema)
        for key in ("anyOf", "oneOf"):
            if depth and set(resolved) == {key}:
                if key == "oneOf":
                    check_exclusive(self._types, resolved[key])
                return all(self._is_plain(each, depth - 1) for each in resolved[key])
        return set(resolved) <= {"type"}

    def _resolved(self, schema: Json) -> Mapping[str, Any]:
        """The schema that a `$ref` points to, or the schema itself. Raises UnwritableError for
        keywords next to a `$ref`."""
        if isinstance(schema, Mapping) and "$ref" in schema and len(schema) > 1:
            raise UnwritableError(f"{min(set(schema) - {'$ref'})} beside $ref is not supported")
        return self._types.resolved(schema)

    def _choices(self, schema: Json, depth: int) -> list[Json] | None:
        """All values of a schema that lists its values (enum, const, null, boolean); otherwise
        None."""
        resolved = self._resolved(schema)
        if not set(resolved) <= {"type", "enum", "const"}:
            return self._choices_of_branches(resolved, depth)
        types = self._types.types_of({"type": resolved["type"]} if "type" in resolved else {})
        if "const" in resolved:
            found = [resolved["const"]]
            if "enum" in resolved:
                raise UnwritableError("enum beside const is not supported")
        elif "enum" in resolved:
            found = resolved["enum"]
        elif resolved.get("type") == "null":
            found = [None]
        elif resolved.get("type") == "boolean":
            found = [True, False]
        else:
            return None
        return [value for value in found if is_of_types(value, types)]

    def _choices_of_branches(self, schema: Mapping[str, Any], depth: int) -> list[Json] | None:
        """The values of all branches of an anyOf or oneOf; None if a branch does not list its
        values or there are other keywords."""
        if not depth or set(schema) not in ({"anyOf"}, {"oneOf"}):
            return None
        (branches,) = schema.values()
        if "oneOf" in schema:
            check_exclusive(self._types, branches)
        found: list[Json] = []
        for each in branches:
            choices = self._choices(each, depth - 1)
            if choices is None:
                return None
            found += choices
        return found

    def _one_of(self, key: str, choices: list[Json]) -> str:
        """A term for those of the values that the parser would read back unchanged."""
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
