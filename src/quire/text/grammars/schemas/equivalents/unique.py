"""Replaces `uniqueItems` by an enum of all arrays without equal items, if there are few.

A grammar can't remember previous items, so each array is listed as an alternative. Called by
`equivalent`.
"""

import itertools
import json
import math
from typing import Any

from quire.text.grammars.schemas.equivalents.names import MAX_DEPTH, MAX_PARTS, Resolve
from quire.text.grammars.schemas.keywords import TYPES

MAX_ARRAYS = 400
"""Maximum number of arrays that replace one uniqueItems. Arrays of five different values: 326."""

_OTHERS = TYPES - {"array", "integer"}


def unique_arrays(schema: dict[str, Any], resolve: Resolve) -> list[list[Any]] | None:
    """All arrays of distinct items whose length obeys `schema`. The items include all values that
    its `items` allows, and perhaps others.

    Returns None if there are more than MAX_ARRAYS, or the values of the items can't be listed.
    """
    most, least = schema.get("maxItems"), schema.get("minItems") or 0
    values = (
        None if schema.get("prefixItems") else _ValueReader(resolve).values(schema.get("items"))
    )
    if values is None or not isinstance(least, int | float) or least < 0:
        return None
    longest = min(len(values), int(most)) if isinstance(most, int | float) else len(values)
    lengths = range(math.ceil(least), longest + 1)
    if sum(math.perm(len(values), length) for length in lengths) > MAX_ARRAYS:
        return None
    return [list(array) for length in lengths for array in itertools.permutations(values, length)]


def as_schema(arrays: list[list[Any]], types: Any) -> dict[str, Any] | bool:
    """A schema of these arrays, and of all values of `types` other than arrays. If `types` is None,
    all types count."""
    given = types if isinstance(types, list) else sorted(_OTHERS) if types is None else [types]
    others = [name for name in given if name != "array"]
    options: list[Any] = [{"type": others}] if others else []
    if arrays:
        options.append({"enum": arrays})
    return {"anyOf": options} if options else False


class _ValueReader:
    """Lists the values that the item schema of one uniqueItems allows."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._num_read = 0

    def values(self, schema: Any, depth: int = 0) -> list[Any] | None:
        """A superset of the values that obey `schema`, without duplicates; None if it can't be
        listed.

        `depth` is the nesting depth of `schema`.
        """
        self._num_read += 1
        if not isinstance(schema, dict) or self._num_read > MAX_PARTS or depth > MAX_DEPTH:
            return None
        if schema.get("$ref") is not None:
            return self.values(self._resolve(schema), depth + 1)
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return _distinct(schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                return _joined([self.values(part, depth + 1) for part in schema[keyword]])
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        return _joined([_values_of_type(name, schema) for name in names])


def _joined(parts: list[list[Any] | None]) -> list[Any] | None:
    if None in parts:
        return None
    return _distinct([value for part in parts for value in part or ()])


def _values_of_type(name: Any, schema: dict[str, Any]) -> list[Any] | None:
    if name == "null":
        return [None]
    if name == "boolean":
        return [True, False]
    least, most = schema.get("minimum"), schema.get("maximum")
    if name != "integer" or not isinstance(least, int) or not isinstance(most, int):
        return None
    return list(range(least, most + 1)) if most - least <= MAX_ARRAYS else None


def _distinct(values: list[Any]) -> list[Any]:
    """The values without duplicates. They are compared as JSON values: 1 equals 1.0, but not
    true."""
    return list({_key(value): value for value in reversed(values)}.values())[::-1]


def _key(value: Any) -> str:
    def plain(part: Any) -> Any:
        if isinstance(part, float) and part.is_integer():
            return int(part)
        if isinstance(part, list):
            return [plain(each) for each in part]
        return {k: plain(v) for k, v in part.items()} if isinstance(part, dict) else part

    return json.dumps(plain(value), sort_keys=True)
