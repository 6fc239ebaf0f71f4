"""Replaces the keyword `not` by an equivalent schema without `not`, if there is one."""

from typing import Any

from quire.text.grammars.schemas.equivalents.names import pattern_of
from quire.text.grammars.schemas.keywords import TYPES, is_annotation


def opposite_of(schema: Any) -> dict[str, Any] | bool | None:
    """A schema of all values that do not obey `schema`. Neither schema has been rewritten.

    Returns None if `schema` is not supported. Note that a value that is not a string obeys any
    pattern.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    rules = {key: value for key, value in schema.items() if not is_annotation(key, value)}
    if not rules:
        return False
    types = rules.pop("type", None)
    if types is not None and not rules:
        return _other_types([types] if isinstance(types, str) else types)
    if types == "string" and rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
        pattern = rules["pattern"]
        return {"pattern": rf"^(?!(?:{pattern})|[\s\S]+(?:{pattern}))"}
    if types in (None, "string") and rules.keys() in ({"const"}, {"enum"}):
        ((keyword, value),) = rules.items()
        return _other_constants([value] if keyword == "const" else value)
    return None


def _other_types(types: Any) -> dict[str, Any] | bool | None:
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        return None
    if "integer" in types and "number" not in types:
        return None
    others = TYPES - set(types) - {"integer"}
    return {"type": sorted(others)} if others else False


def _other_constants(values: Any) -> dict[str, Any] | None:
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, str | None) for value in values):
        return None
    opposite: dict[str, Any] = {}
    texts = [value for value in values if value is not None]
    if texts:
        opposite["pattern"] = f"^(?!{pattern_of(texts)})"
    if len(texts) < len(values):
        opposite["type"] = sorted(TYPES - {"integer", "null"})
    return opposite
