"""Bounds the intersections of strings in a rewritten schema.

Patterns and formats that hold for the same string, through allOf, a $ref or beside each other,
become one intersection. `intersections` says what one may cost. Called by `translate`.
"""

from typing import Any, NamedTuple

from quire.text.grammars.intersections.set_counts import (
    MAX_COMPARISONS,
    TooManyMembersError,
    check_intersection,
    regex_sets,
)
from quire.text.grammars.schemas.refusals import refusal

_FORMAT_SETS = 8
"""At least as many as any of llguidance's expressions for formats has."""

_DEFINITIONS = "#/$defs/"


class Intersected(NamedTuple):
    """The members of the intersection that a schema is for a string, and the product of their
    numbers of character sets. Of alternatives: the most of each."""

    num_members: int = 0
    num_comparisons: int = 1

    def both(self, other: "Intersected") -> "Intersected":
        """Where both hold."""
        return Intersected(
            self.num_members + other.num_members, self.num_comparisons * other.num_comparisons
        )

    def either(self, other: "Intersected") -> "Intersected":
        """Where one of them holds."""
        return Intersected(*map(max, self, other))


class StringIntersections:
    """Of one rewritten document."""

    def __init__(self, root: dict[str, Any], origin: str) -> None:
        """origin: the field of the request that has the schema, for messages."""
        self._definitions = root.get("$defs", {})
        self._origin = origin
        self._known: dict[int, Intersected] = {}

    def check(self, subschemas: list[tuple[str, dict[str, Any]]]) -> None:
        """Raises InvalidRequestError that names the place and the keyword.

        subschemas: all of the document with their pointers, inner ones first.
        """
        for pointer, schema in subschemas:
            try:
                check_intersection(*self._count(schema))
                self._check_names(schema)
            except TooManyMembersError as error:
                keyword = next((name for name in ("allOf", "$ref") if name in schema), "pattern")
                if "patternProperties" in schema and "pattern" not in schema:
                    keyword = "patternProperties"
                raise refusal(self._origin, pointer, f"{keyword}: {error}") from error

    def _count(self, schema: Any) -> Intersected:
        if not isinstance(schema, dict):
            return Intersected()
        known = self._known.get(id(schema))
        if known is not None:
            return known
        self._known[id(schema)] = Intersected()  # for a circle, which can't be obeyed
        found = _own(schema)
        for part in schema.get("allOf", ()):
            found = found.both(self._count(part))
        for keyword in ("anyOf", "oneOf"):
            alternatives = Intersected()
            for part in schema.get(keyword, ()):
                alternatives = alternatives.either(self._count(part))
            found = found.both(alternatives)
        name = str(schema.get("$ref", "")).removeprefix(_DEFINITIONS)
        if name in self._definitions:
            found = found.both(self._count(self._definitions[name]))
        self._known[id(schema)] = found
        return found

    def _check_names(self, schema: dict[str, Any]) -> None:
        """Every two patterns for names are intersected, to see that no name has both."""
        most = max(
            (regex_sets(each).total for each in schema.get("patternProperties", ())), default=0
        )
        if (most + 1) ** 2 > MAX_COMPARISONS:
            raise TooManyMembersError(
                f"a pattern has {most} different character classes; use fewer"
            )


def _own(schema: dict[str, Any]) -> Intersected:
    """Of the keywords of `schema` itself."""
    found = Intersected()
    if "pattern" in schema:  # found anywhere in the text: what stands around it is one set more
        found = found.both(Intersected(1, regex_sets(schema["pattern"]).total + 1))
    if "format" in schema:
        found = found.both(Intersected(1, _FORMAT_SETS))
    if "minLength" in schema or "maxLength" in schema:
        found = found.both(Intersected(1, 1))
    return found
