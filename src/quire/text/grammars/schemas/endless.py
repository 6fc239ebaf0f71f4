"""Finds recursive schema definitions that no finite value can obey."""

from collections.abc import Mapping
from typing import Any

from quire.text.grammars.schemas.keywords import TYPES

_DEFINITIONS = "#/$defs/"


def endless_definitions(definitions: Mapping[str, Any]) -> list[str]:
    """The names of those rewritten `definitions` whose values would contain each other endlessly.

    All references must refer to these definitions. Definitions without values for other reasons are
    not found.
    """
    ending: set[str] = set()
    left = list(definitions)
    # Repeat until no further definition is found to have a finite value.
    while True:
        still = [name for name in left if not can_end(definitions[name], ending)]
        if len(still) == len(left):
            return left
        ending.update(set(left) - set(still))
        left = still


def can_end(schema: Any, ending: set[str]) -> bool:
    """True if a finite value may obey `schema`, provided that each definition in `ending` has a
    finite value."""
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if reference is not None and reference.removeprefix(_DEFINITIONS) not in ending:
        return False
    if not all(can_end(part, ending) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(can_end(part, ending) for part in schema[keyword]):
            return False
    types = schema.get("type", TYPES)
    for name in [types] if isinstance(types, str) else types:
        if name == "array":
            if _array_can_end(schema, ending):
                return True
        elif name != "object" or _object_can_end(schema, ending):
            return True
    return False


def _array_can_end(schema: dict[str, Any], ending: set[str]) -> bool:
    least = schema.get("minItems", 0)
    first = schema.get("prefixItems", ())[:least]
    if not all(can_end(part, ending) for part in first):
        return False
    return least <= len(first) or can_end(schema.get("items", True), ending)


def _object_can_end(schema: dict[str, Any], ending: set[str]) -> bool:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    others = schema.get("additionalProperties", True)
    # A name that is not listed may match a pattern.
    unlisted = others if isinstance(others, dict) and not patterns else True
    required = set(schema.get("required", ()))
    if not all(can_end(properties.get(name, unlisted), ending) for name in required):
        return False
    if schema.get("minProperties", 0) <= len(required):
        return True
    values = (*properties.values(), *patterns.values(), others)
    return any(can_end(value, ending) for value in values)
