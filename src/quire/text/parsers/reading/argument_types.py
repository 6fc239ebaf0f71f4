"""Converts arguments written as unquoted text to JSON, by the types in the tool's schema.

Called by the parsers of dialects that write values without JSON's quotes.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_REFERENCES = 8


class ArgumentTypes:
    """Knows the JSON types that a tool's schema allows for each argument."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        """`parameters` is the JSON schema of the arguments' object; None if there is no schema."""
        self._root: Mapping[str, Any] = parameters or {}
        self._known: dict[str, frozenset[str]] = {}

    def of(self, name: str) -> frozenset[str]:
        """The names of the JSON types that an argument may have."""
        known = self._known.get(name)
        if known is None:
            properties = self.resolved(self._root).get("properties")
            schema = properties.get(name) if isinstance(properties, Mapping) else None
            if schema is None:
                schema = self._root.get("additionalProperties")
            known = self._known[name] = self._types(schema, _MAX_REFERENCES)
        return known

    def is_text(self, name: str) -> bool:
        """True if the argument must be a string."""
        return self.of(name) == {"string"}

    def as_json(self, name: str, text: str) -> str:
        """Convert a value's text to JSON. The result is a JSON string, unless the text is valid
        JSON of another allowed type."""
        types = self.of(name)
        stripped = text.strip()
        word = stripped.lower()
        if word in _WORDS and _type_of(_WORDS[word]) in types:
            return json.dumps(_WORDS[word])
        value = _parsed(stripped)
        if value is not _NOTHING:
            is_text = isinstance(value, str)
            if "string" not in types or (is_of_types(value, types) and not is_text):
                return stripped
        return json.dumps(text, ensure_ascii=False)

    def resolved(self, schema: Json) -> Mapping[str, Any]:
        """The schema after following local `$ref`s; {} if a reference is invalid."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            schema = self._root
            for part in filter(None, reference[1:].split("/")):
                part = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(part) if isinstance(schema, Mapping) else None
        return {}

    def types_of(self, schema: Json) -> frozenset[str]:
        """The names of the JSON types that `schema` allows; it is a part of the tool's schema."""
        return self._types(schema, _MAX_REFERENCES)

    def _types(self, schema: Json, depth: int) -> frozenset[str]:
        schema = self.resolved(schema)
        if schema.get("nullable") is True:  # a keyword of OpenAPI
            return self._types({**schema, "nullable": False}, depth) | {"null"}
        declared = schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared}) & _TYPES or _TYPES
        if isinstance(declared, list):
            return frozenset(kind for kind in declared if isinstance(kind, str)) & _TYPES or _TYPES
        if "const" in schema:
            return frozenset({_type_of(schema["const"])})
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return frozenset(_type_of(value) for value in schema["enum"])
        for key in ("anyOf", "oneOf"):
            if depth and isinstance(schema.get(key), list) and schema[key]:
                return frozenset().union(*(self._types(each, depth - 1) for each in schema[key]))
        if depth and isinstance(schema.get("allOf"), list) and schema["allOf"]:
            return _TYPES.intersection(*(self._types(each, depth - 1) for each in schema["allOf"]))
        return _TYPES


ANY_ARGUMENTS = ArgumentTypes(None)

_NOTHING = object()


def _parsed(text: str) -> Json:
    """The value of a JSON text; _NOTHING if the text is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_object(text: str) -> bool:
    """True if `text` is a JSON object."""
    return isinstance(_parsed(text), dict)


def is_of_types(value: Json, types: Collection[str]) -> bool:
    """True if a value has one of these JSON types."""
    return _type_of(value) in types or _wider_type_of(value) in types


def _type_of(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def _wider_type_of(value: Json) -> str:
    """The second JSON type that a number has: an integer is also a number, and a float such as 3.0
    is also an integer."""
    kind = _type_of(value)
    if kind == "integer":
        return "number"
    return "integer" if kind == "number" and value.is_integer() else kind
