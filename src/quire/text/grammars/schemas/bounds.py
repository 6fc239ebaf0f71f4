"""Checks bounds on a JSON schema before it is compiled, so that grammars don't explode.

llguidance does not limit all of its work: it compares all pairs of an object's patterns, builds an
automaton with a state for each remainder of multipleOf, and follows references by recursion. Each
bound here limits such work; `limits` has the simpler bounds.
"""

import math
from decimal import Decimal
from typing import Any

from quire.text.grammars.schemas.refusals import refusal

MAX_DEPTH = 200
"""Maximum nesting of schemas, with references followed."""

MAX_OPTIONAL_PROPERTIES = 400
"""Maximum number of optional properties of an object, since any later property may follow each
property."""

MAX_COUNTED_PROPERTIES = 50
"""Maximum number of properties of an object in a schema with minProperties or maxProperties, which
multiply the rules."""

MAX_PATTERNS = 48
"""Maximum number of keys of patternProperties in the whole schema, since all pairs are compared."""

MAX_ALTERNATIVES = 1_000
"""Maximum number of schemas in one anyOf or oneOf, and of arrays and objects in one enum."""

MAX_MULTIPLE = 5_000
"""Maximum of the least common multiple of all multipleOf values in a schema, without trailing
zeros."""

_BELOW = ("items", "additionalProperties")
_LISTS_BELOW = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS_BELOW = ("properties", "patternProperties")


class SchemaBounds:
    """Adds up the costs of one rewritten schema. Methods raise InvalidRequestError if a bound is
    exceeded."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._num_patterns = 0
        self._multiple = 1
        self._counted_at: str | None = None
        self._most_properties = 0
        #: True if an object lists properties and also allows unlisted ones.
        self.has_open_names = False

    def add(self, pointer: str, schema: dict[str, Any]) -> None:
        """Add the costs of the keywords of the rewritten `schema` at `pointer`, without its
        subschemas."""
        self._add_properties(pointer, schema)
        self._add_alternatives(pointer, schema)
        if "multipleOf" in schema:
            digits = Decimal(repr(schema["multipleOf"])).normalize().as_tuple().digits
            self._multiple = math.lcm(self._multiple, int("".join(map(str, digits))))
            if self._multiple > MAX_MULTIPLE:
                raise refusal(
                    self._origin,
                    pointer,
                    "multipleOf: the least common multiple of all values in the schema, without"
                    f" trailing zeros, is above {MAX_MULTIPLE}, which is not supported",
                )

    def _add_properties(self, pointer: str, schema: dict[str, Any]) -> None:
        names = schema.get("properties", {})
        required = schema.get("required", [])
        patterns = schema.get("patternProperties", {})
        others = patterns or schema.get("additionalProperties") is not False
        if (names or required or patterns) and others:
            self.has_open_names = True
        num_optional = len(names.keys() - set(required))
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            raise refusal(
                self._origin,
                pointer,
                f"properties has {num_optional} optional properties; up to"
                f" {MAX_OPTIONAL_PROPERTIES} are supported: list the others under required",
            )
        self._num_patterns += len(patterns)
        if self._num_patterns > MAX_PATTERNS:
            raise refusal(
                self._origin,
                pointer,
                f"patternProperties: the schema has more than {MAX_PATTERNS} patterns for names",
            )
        self._most_properties = max(self._most_properties, len(names))
        if "minProperties" in schema or "maxProperties" in schema:
            self._counted_at = pointer
        if self._counted_at is not None and self._most_properties > MAX_COUNTED_PROPERTIES:
            raise refusal(
                self._origin,
                self._counted_at,
                "minProperties and maxProperties are not supported in a schema in which an object"
                f" has more than {MAX_COUNTED_PROPERTIES} properties",
            )

    def _add_alternatives(self, pointer: str, schema: dict[str, Any]) -> None:
        for keyword in ("anyOf", "oneOf", "enum"):
            values = schema.get(keyword, ())
            if keyword == "enum":
                values = [value for value in values if isinstance(value, list | dict)]
            if len(values) > MAX_ALTERNATIVES:
                what = "arrays and objects" if keyword == "enum" else "schemas"
                raise refusal(
                    self._origin,
                    pointer,
                    f"{keyword} has {len(values)} {what}; up to {MAX_ALTERNATIVES} are supported",
                )

    def check_depth(self, root: dict[str, Any]) -> None:
        """Raises InvalidRequestError if the rewritten `root` nests too deeply.

        Each reference is followed once, at its first use, as llguidance does.
        """
        definitions = root.get("$defs", {})
        seen: set[str] = set()
        pending: list[tuple[int, Any]] = [(0, root)]
        while pending:
            depth, schema = pending.pop()
            if not isinstance(schema, dict):
                continue
            if depth > MAX_DEPTH:
                raise refusal(
                    self._origin,
                    "#",
                    f"$ref: schemas nest deeper than {MAX_DEPTH}, references followed",
                )
            below = _parts(schema)
            name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
            if name and name not in seen:
                seen.add(name)
                below.append(definitions[name])
            pending.extend((depth + 1, part) for part in below)


def _parts(schema: dict[str, Any]) -> list[Any]:
    parts = [schema[key] for key in _BELOW if key in schema]
    for key in _LISTS_BELOW:
        parts.extend(schema.get(key, ()))
    for key in _MAPS_BELOW:
        parts.extend(schema.get(key, {}).values())
    return parts
