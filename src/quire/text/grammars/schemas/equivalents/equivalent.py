"""Finds a schema that replaces a JSON Schema keyword which llguidance does not support."""

from typing import Any

from quire.text.grammars.schemas.equivalents.names import Resolve, only_names
from quire.text.grammars.schemas.equivalents.opposites import opposite_of
from quire.text.grammars.schemas.equivalents.unique import as_schema, unique_arrays
from quire.text.grammars.schemas.patterns.translation import PatternTranslator

KEYWORDS = frozenset(
    {"not", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
)


def equivalent(
    keyword: str, schema: dict[str, Any], resolve: Resolve, patterns: PatternTranslator
) -> Any:
    """A schema that allows the same values as `keyword` in `schema`. Like `schema`, it may have
    unsupported keywords, which the caller rewrites.

    Returns True if the keyword has no effect, and None if there is no equivalent schema. `patterns`
    translates all patterns of the whole schema. Raises ValueError, with the reason, for an
    unsupported propertyNames.
    """
    value = schema[keyword]
    if keyword == "not":
        return opposite_of(value)
    if keyword == "propertyNames":
        return only_names(value, resolve, patterns)
    if keyword == "uniqueItems":
        if value is False or schema.get("maxItems") in (0, 1):
            return True
        arrays = unique_arrays(schema, resolve) if value is True else None
        return None if arrays is None else as_schema(arrays, schema.get("type"))
    return True if value is True else None
