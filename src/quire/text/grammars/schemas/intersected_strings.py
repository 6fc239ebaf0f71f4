"""Refuses rewritten schemas whose intersected patterns and formats would cost too much.

Patterns and formats that apply to the same string (side by side, in allOf, or through a $ref)
become one intersection. Package `intersections` limits its cost. Called by `translate`.
"""

from operator import mul
from typing import Any, NamedTuple

from quire.text.grammars.intersections.regex_sets import NUM_CHARACTERS, regex_sets
from quire.text.grammars.intersections.set_counts import (
    MAX_MEETING_OF_FEW,
    ONE_OF_ALL,
    Counts,
    SetCount,
    TooManyMembersError,
    check_intersection,
)
from quire.text.grammars.schemas.refusals import refusal

_OF_FORMAT: Counts = (4,) * NUM_CHARACTERS
"""For each character, an upper bound: llguidance's expression for a format has at most this number
of sets with the character."""

_DEFINITIONS = "#/$defs/"


class Intersected(NamedTuple):
    """The size of the intersection that a schema applies to a string. If the schema has
    alternatives, each number is the maximum over the alternatives."""

    num_members: int = 0
    #: For each character, the product over all members of the number of sets that contain it.
    meeting: Counts = ONE_OF_ALL

    def both(self, other: "Intersected") -> "Intersected":
        """The size if both schemas apply."""
        if not other.num_members:
            return self
        return Intersected(
            self.num_members + other.num_members, tuple(map(mul, self.meeting, other.meeting))
        )

    def either(self, other: "Intersected") -> "Intersected":
        """Upper bounds on the size if one of the two schemas applies."""
        if not other.num_members:
            return self
        return Intersected(
            max(self.num_members, other.num_members), tuple(map(max, self.meeting, other.meeting))
        )


class StringIntersections:
    """Checks the intersections in one rewritten schema."""

    def __init__(self, root: dict[str, Any], origin: str) -> None:
        """`origin` is the name of the request's field that holds the schema, for errors."""
        self._definitions = root.get("$defs", {})
        self._origin = origin
        self._known: dict[int, Intersected] = {}

    def check(self, subschemas: list[tuple[str, dict[str, Any]]]) -> None:
        """Raises InvalidRequestError, with place and keyword, if an intersection would cost too
        much.

        `subschemas` are the (pointer, schema) pairs of all subschemas, inner ones first.
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
        self._known[id(schema)] = Intersected()  # ends the recursion of circular references
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
        """Check the patterns for property names, since llguidance intersects all pairs of them."""
        patterns = schema.get("patternProperties", ())
        most = max((max(_pattern_counts(each)) for each in patterns), default=0)
        if len(patterns) > 1 and most**2 > MAX_MEETING_OF_FEW:
            raise TooManyMembersError(
                f"a pattern has {most} character classes with the same character; use fewer, or"
                " classes that exclude each other"
            )


def _own(schema: dict[str, Any]) -> Intersected:
    """The size of the intersection of the keywords of `schema` itself, without subschemas."""
    found = Intersected()
    if "pattern" in schema:
        found = found.both(Intersected(1, _pattern_counts(schema["pattern"])))
    if "format" in schema:
        found = found.both(Intersected(1, _OF_FORMAT))
    if "minLength" in schema or "maxLength" in schema:
        found = found.both(Intersected(1, ONE_OF_ALL))
    return found


def _pattern_counts(pattern: str) -> Counts:
    """For each character, the number of a pattern's character classes that contain it. A pattern
    that is not anchored has an additional class for the text around the match."""
    is_whole = pattern.startswith("^") and pattern.endswith("$") and "|" not in pattern
    return SetCount(regex_sets(pattern), (0 if is_whole else 1,) * NUM_CHARACTERS).counts()
