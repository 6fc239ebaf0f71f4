"""Checks the values of keywords that have plain values: counts, bounds, constants, names."""

from collections.abc import Iterator
from typing import Any

from quire.text.grammars import limits
from quire.text.grammars.schemas.keywords import COUNT_KEYWORDS
from quire.text.grammars.schemas.refusals import refusal

_MAX_EXACT = 2**53
"""llguidance holds numbers as binary floats of 64 bits: whole numbers are exact up to here."""


class ValueChecker:
    """Checks one document's values; the lists of all its enums together are bounded."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._num_constants = 0

    def check(self, pointer: str, schema: dict[str, Any], keyword: str) -> Any:
        """The value of `keyword` in `schema`, which is at `pointer`. Raises if it can't be."""
        value = schema[keyword]
        if keyword in COUNT_KEYWORDS:
            return self._count(pointer, schema, keyword)
        if keyword == "const":
            self._constant(pointer, keyword, value)
        elif keyword == "enum":
            if not isinstance(value, list) or not value:
                raise refusal(self._origin, pointer, "enum must be a list with at least one value")
            for constant in value:
                self._constant(pointer, keyword, constant)
        elif not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise refusal(self._origin, pointer, f"{keyword} must be a list of strings")
        return value

    def number(
        self, pointer: str, schema: dict[str, Any], keyword: str
    ) -> Iterator[tuple[str, Any]]:
        """The bound that `keyword` sets; draft 4's booleans make the other bound exclusive."""
        value = schema[keyword]
        exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(self._origin, pointer, f"{keyword} must be a number")
        if keyword == "multipleOf" and value <= 0:
            raise refusal(self._origin, pointer, "multipleOf must be above 0")
        self._exact(pointer, keyword, value)
        yield (exclusive if exclusive and schema.get(exclusive) is True else keyword), value

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
        num_required = len(set(required)) if isinstance(required, list) else 0
        if keyword == "minProperties" and value > num_required + 1:
            raise refusal(
                self._origin,
                pointer,
                "minProperties is more than 1 above the number of required properties, which is"
                " not supported: a grammar does not see that a name comes twice",
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
            elif isinstance(part, int | float) and not isinstance(part, bool):
                self._exact(pointer, keyword, part)

    def _exact(self, pointer: str, keyword: str, value: float) -> None:
        if abs(value) > _MAX_EXACT:
            raise refusal(
                self._origin,
                pointer,
                f"{keyword} has a number beyond 2**53, up to which grammars are exact",
            )
