"""Writes grammar rules for argument values in formats other than JSON.

The values obey a JSON schema. Used for dialects whose calls have unquoted keys, strings between
marks, or Python literals. A term is an expression in the body of a grammar rule.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.grammars.lark import literal
from quire.text.parsers.grammars.rules import Rules
from quire.text.parsers.reading.argument_types import ArgumentTypes, Json, is_of_types

_NUMBER = r"/-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?/"
_INTEGER = "/-?(?:0|[1-9][0-9]{0,15})/"
SILENT_KEYWORDS = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "nullable", "readOnly", "title", "writeOnly",
})  # fmt: skip
_KNOWN = SILENT_KEYWORDS | {
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "properties", "required",
    "additionalProperties", "items", "minItems", "maxItems",
}  # fmt: skip
_MAX_RULES = 2_000


class UnwritableError(Exception):
    """Raised if a part of a schema can't be enforced in this format. The message names that
    part."""


def check_exclusive(types: ArgumentTypes, branches: Iterable[Json]) -> None:
    """Raises UnwritableError if a value might obey two branches of a oneOf."""
    seen: set[str] = set()
    for branch in branches:
        found = types.types_of(branch)
        found |= {"number"} if "integer" in found else frozenset()
        if seen & found:
            raise UnwritableError("oneOf is supported only where its schemas differ in type")
        seen |= found


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """The syntax of values in one format."""

    #: A term for any string.
    string: str
    #: Returns the term for a given string.
    quoted: Callable[[str], str]
    #: Returns the term for an argument's name and the separator after it.
    argument: Callable[[str], str]
    #: Returns the term for a member's name in a nested object and the separator after it.
    key: Callable[[str], str]
    #: A term for any argument's name and the separator after it.
    any_key: str
    #: The words for true, false and null.
    words: tuple[str, str, str] = ("true", "false", "null")
    separator: str = ","


class ValueRules:
    """Writes rules for the parts of one schema."""

    def __init__(self, rules: Rules, syntax: ValueSyntax, root: Mapping[str, Any]) -> None:
        self._rules = rules
        self._syntax = syntax
        self._types = ArgumentTypes(root)
        self._references: dict[str, str] = {}
        self._num_rules = 0
        self._anything: str | None = None

    def value(self, schema: Json) -> str:
        """A term for the values that obey `schema`. Raises UnwritableError."""
        self._num_rules += 1
        if self._num_rules > _MAX_RULES:
            raise UnwritableError("the schema is too large")
        if schema is True or schema == {}:
            return self.anything()
        if not isinstance(schema, Mapping):
            raise UnwritableError(f"{schema!r} is not a schema that allows values")
        if unknown := sorted(set(schema) - _KNOWN):
            raise UnwritableError(f"{unknown[0]} is not supported")
        for key in ("$ref", "anyOf", "oneOf", "const", "enum"):
            if key in schema:
                return self._one_of(key, schema)
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        if declared is None:
            kinds = ["object"] if "properties" in schema else [None]
        return self._rules.any_of(self._of_type(kind, schema) for kind in kinds)

    def _one_of(self, key: str, schema: Mapping[str, Any]) -> str:
        """A term for the values that the keyword `key` allows. Refuses other keywords beside it,
        except `type` beside enum and const."""
        beside = set(schema) - SILENT_KEYWORDS - {key}
        values = [schema["const"]] if key == "const" else schema.get("enum", [])
        if key in ("const", "enum") and "type" in schema:
            beside.discard("type")
            types = self._types.types_of({"type": schema["type"]})
            values = [value for value in values if is_of_types(value, types)]
        if beside:
            raise UnwritableError(f"{min(beside)} beside {key} is not supported")
        if key == "$ref":
            return self._reference(schema)
        if key in ("const", "enum"):
            if not values:
                raise UnwritableError(f"no value of {key} has the declared type")
            return self._rules.any_of(map(self._constant, values))
        if key == "oneOf":
            check_exclusive(self._types, schema["oneOf"])
        return self._rules.any_of(map(self.value, schema[key]))

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """A term for a call's arguments, which are the members of the object that `schema`
        describes."""
        return self._members(schema, self._syntax.argument)

    def _members(self, schema: Mapping[str, Any], key: Callable[[str], str]) -> str:
        """A term for the properties of an object in the schema's order. Optional properties may be
        missing.

        If the schema lists no properties, any names with any values are allowed.
        """
        self._check_object(schema)
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            member = self._rules.add("member", f"{self._syntax.any_key} {self.anything()}")
            return f"({member} ({literal(self._syntax.separator)} {member})*)?"
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        if missing := sorted(required - set(properties)):
            raise UnwritableError(f"required names {missing[0]!r}, which is no property")
        separator = literal(self._syntax.separator)
        rest = '""'
        # Work from the last property to the first. `rest` is the term after a member, `first` the
        # term at the beginning of the object.
        first = '""'
        for name, each in reversed(properties.items()):
            member = self._rules.add("member", f"{key(name)} {self.value(each)}")
            rest_name = self._rules.add("rest", rest)
            if name in required:
                first = self._rules.add("first", f"{member} {rest_name}")
                rest = f"{separator} {member} {rest_name}"
            else:
                first = self._rules.add("first", f"{member} {rest_name} | {first}")
                rest = f"{separator} {member} {rest_name} | {rest_name}"
        return first

    def anything(self) -> str:
        """A term for any value."""
        if self._anything is None:
            self._anything = name = self._rules.name("value")
            syntax, separator = self._syntax, literal(self._syntax.separator)
            words = " | ".join(map(literal, syntax.words))
            items = f'"[" ({name} ({separator} {name})*)? "]"'
            self._rules.define(name, f"{syntax.string} | {_NUMBER} | {words} | {items}")
        return self._anything

    def _of_type(self, kind: Json, schema: Mapping[str, Any]) -> str:
        syntax = self._syntax
        if kind is None:
            return self.anything()
        if kind == "string":
            return syntax.string
        if kind == "integer":
            return _INTEGER
        if kind == "number":
            return _NUMBER
        if kind == "boolean":
            return self._rules.any_of(map(literal, syntax.words[:2]))
        if kind == "null":
            return literal(syntax.words[2])
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        raise UnwritableError(f"type is {kind!r}")

    def _object(self, schema: Mapping[str, Any]) -> str:
        return self._rules.add("object", f'"{{" {self._members(schema, self._syntax.key)} "}}"')

    def _check_object(self, schema: Mapping[str, Any]) -> None:
        if unknown := sorted(set(schema) - _KNOWN):
            raise UnwritableError(f"{unknown[0]} is not supported")
        if schema.get("additionalProperties") not in (None, False, True):
            raise UnwritableError("additionalProperties with a schema is not supported")

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rules.add("item", self.value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and least > most:
            raise UnwritableError("minItems is above maxItems")
        if most == 0:
            return literal("[]")
        more = f"({literal(self._syntax.separator)} {item})"
        more += f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        inside = f"{item} {more}"
        return self._rules.add("array", f'"[" ({inside}){"" if least else "?"} "]"')

    def _constant(self, value: Json) -> str:
        if isinstance(value, str):
            return self._syntax.quoted(value)
        if value is True or value is False or value is None:
            return literal(self._syntax.words[{True: 0, False: 1, None: 2}[value]])
        if isinstance(value, (int, float)):
            return literal(json.dumps(value))
        raise UnwritableError("enum and const with objects or arrays are not supported")

    def _reference(self, schema: Mapping[str, Any]) -> str:
        reference = str(schema["$ref"])
        if reference not in self._references:
            self._references[reference] = name = self._rules.name("named")
            self._rules.define(name, self.value(dict(self._types.resolved(schema))))
        return self._references[reference]
