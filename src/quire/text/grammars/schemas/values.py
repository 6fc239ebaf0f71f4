"""Checks the values of JSON Schema keywords that are not schemas: counts, bounds, constants."""

from collections.abc import Iterator
from typing import Any

from quire.text.grammars import limits
from quire.text.grammars.schemas.keywords import COUNT_KEYWORDS, TYPES
from quire.text.grammars.schemas.numbers import (
    EXACT,
    OUTERMOST,
    greatest,
    is_exact,
    last_place,
    least,
)
from quire.text.grammars.schemas.refusals import refusal


class ValueChecker:
    """Checks the values in one JSON schema, and bounds the total number of its constants. `plain`,
    `types` and `number` yield (keyword, value) pairs of the rewritten schema."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._num_constants = 0

    def plain(
        self, pointer: str, schema: dict[str, Any], keyword: str
    ) -> Iterator[tuple[str, Any]]:
        """Check a count, const, enum or required. `schema` is at `pointer`. Raises
        InvalidRequestError."""
        value = schema[keyword]
        if keyword in COUNT_KEYWORDS:
            value = self._count(pointer, schema, keyword)
        elif keyword == "const":
            self._constant(pointer, keyword, value)
        elif keyword == "enum":
            if not isinstance(value, list) or not value:
                raise refusal(self._origin, pointer, "enum must be a list with at least one value")
            for constant in value:
                self._constant(pointer, keyword, constant)
        elif not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise refusal(self._origin, pointer, f"{keyword} must be a list of strings")
        yield keyword, value

    def types(
        self, pointer: str, schema: dict[str, Any], keyword: str
    ) -> Iterator[tuple[str, Any]]:
        """Check `type`, and add "null" if OpenAPI's `nullable` is set."""
        value = schema[keyword]
        types = value if isinstance(value, list) else [value]
        for name in types:
            if not isinstance(name, str) or name not in TYPES:
                raise refusal(
                    self._origin,
                    pointer,
                    f"type must be of {', '.join(sorted(TYPES))}, not {str(name)[:100]!r}",
                )
        if not types:
            raise refusal(self._origin, pointer, "type is an empty list, so no value obeys it")
        if schema.get("nullable") is True and "null" not in types:
            types = [*types, "null"]
        if "number" in types and "integer" in types:
            types = [name for name in types if name != "integer"]
        yield keyword, list(dict.fromkeys(types)) if len(types) > 1 else types[0]

    def number(
        self, pointer: str, schema: dict[str, Any], keyword: str
    ) -> Iterator[tuple[str, Any]]:
        """Check a bound or multipleOf, and make the bound exact. In draft 4, `exclusiveMinimum:
        true` makes `minimum` exclusive."""
        value = schema[keyword]
        exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(self._origin, pointer, f"{keyword} must be a number")
        if keyword == "multipleOf" and value <= 0:
            raise refusal(self._origin, pointer, "multipleOf must be above 0")
        if exclusive and schema.get(exclusive) is True:
            keyword = exclusive
        is_exclusive = keyword.startswith("exclusive")
        if keyword == "multipleOf" or (abs(value) <= EXACT and not is_exclusive):
            yield keyword, value
        elif abs(value) < EXACT or (abs(value) == EXACT and not _is_integer(schema)):
            yield keyword, self._exclusive(schema, keyword, value)
        else:
            yield "allOf", [self.beyond_exact(pointer, schema, keyword, value)]

    def _exclusive(self, schema: dict[str, Any], keyword: str, value: float) -> float:
        """The exclusive bound `value` of `schema`, narrowed if llguidance would treat it as
        inclusive.

        If both bounds are less than 1 apart, llguidance treats an exclusive integer bound as
        inclusive: it allows 2 for numbers above 2 and below 2.5. So the bound is moved inwards by
        one unit in its last digit.
        """
        if not float(value).is_integer() or _is_integer(schema):
            return value
        sign, others = (1, ("maximum", "exclusiveMaximum"))
        if keyword == "exclusiveMaximum":
            sign, others = (-1, ("minimum", "exclusiveMinimum"))
        for bound in (schema.get(name) for name in others):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            if 0 < (bound - value) * sign < 1:
                return value + sign * last_place(value)
        return value

    def beyond_exact(
        self, pointer: str, schema: dict[str, Any], keyword: str, value: float
    ) -> dict[str, float]:
        """The keywords that replace a bound `value` beyond 2**53. They have exact numbers, and the
        bound is narrowed to one."""
        narrowed = greatest if keyword.endswith("aximum") else least
        is_exclusive = keyword.startswith("exclusive")
        bound = narrowed(value, is_exclusive=is_exclusive, is_integer=_is_integer(schema))
        if bound is None:
            raise refusal(
                self._origin, pointer, f"{keyword} is beyond 2**63, which is not supported"
            )
        if narrowed is greatest:
            return {"maximum": bound, **({"minimum": -OUTERMOST} if bound < 0 else {})}
        return {"minimum": bound, **({"maximum": OUTERMOST} if bound > 0 else {})}

    def _count(self, pointer: str, schema: dict[str, Any], keyword: str) -> int:
        value = schema[keyword]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise refusal(self._origin, pointer, f"{keyword} must be a whole number, 0 or above")
        bound = (
            limits.MAX_STRING_CHARACTERS if keyword.endswith("Length") else limits.MAX_ARRAY_ITEMS
        )
        if value > bound:
            raise refusal(
                self._origin, pointer, f"{keyword} is {value}; a grammar counts up to {bound}"
            )
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        num_required = len({name for name in names if isinstance(name, str)})
        if keyword == "minProperties" and value > num_required + 1:
            raise refusal(
                self._origin,
                pointer,
                "minProperties is more than 1 above the number of required properties, which is"
                " not supported: a grammar can't detect that a name occurs twice",
            )
        return value

    def _constant(self, pointer: str, keyword: str, value: Any) -> None:
        pending = [value]
        while pending:
            part = pending.pop()
            self._num_constants += 1
            if self._num_constants > limits.MAX_ENUM_VALUES:
                raise refusal(
                    self._origin,
                    pointer,
                    f"{keyword}: the schema has more than {limits.MAX_ENUM_VALUES} constant values",
                )
            if isinstance(part, dict):
                pending.extend(part.values())
            elif isinstance(part, list):
                pending.extend(part)
            elif isinstance(part, int | float) and not is_exact(part):
                raise refusal(
                    self._origin,
                    pointer,
                    f"{keyword} has a number beyond 2**53 that grammars don't keep exactly",
                )


def _is_integer(schema: dict[str, Any]) -> bool:
    """True if all numbers that the schema allows are integers."""
    types = schema.get("type")
    return types == "integer" or (
        isinstance(types, list) and "integer" in types and "number" not in types
    )
