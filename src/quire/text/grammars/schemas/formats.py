"""Replaces the JSON Schema keyword `format` by keywords that enforce it.

Standard formats are always enforced, even next to a pattern. Formats of libraries (such as Zod's
cuid) are enforced only without a pattern. Unknown formats are ignored, as the standard allows.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from quire.text.grammars.schemas.keywords import TYPES
from quire.text.grammars.schemas.numbers import greatest, least
from quire.text.grammars.schemas.patterns.expressions import parsed, written
from quire.text.grammars.schemas.patterns.format_patterns import LOCAL, OF_LIBRARIES, STANDARD
from quire.text.grammars.schemas.patterns.languages import NOTHING
from quire.text.grammars.schemas.patterns.translation import PatternTranslator
from quire.text.grammars.schemas.refusals import refusal

OF_LLGUIDANCE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Standard formats that llguidance implements."""

INTEGERS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64, 128)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64, 128)},
    "double-int": (-(2**53) + 1, 2**53 - 1),
    "int": (-(2**63), 2**63 - 1),
    "uint": (0, 2**64 - 1),
}
"""(least, greatest) value of each integer format of OpenAPI and schemars."""


_NO_NUMBERS = sorted(TYPES - {"integer", "number"})


def enforced_format(
    schema: dict[str, Any], pointer: str, origin: str, patterns: PatternTranslator
) -> Iterator[tuple[str, Any]]:
    """Yields the (keyword, value) pairs that replace the format of `schema`, which is at `pointer`.

    `patterns` translates all patterns of the whole schema. Raises InvalidRequestError if the format
    is not a string.
    """
    name = schema["format"]
    if not isinstance(name, str):
        raise refusal(origin, pointer, "format must be a string")
    pattern = schema.get("pattern")
    if name in INTEGERS:
        bounds = INTEGERS[name]
        low = least(bounds[0], is_exclusive=False, is_integer=True)
        high = greatest(bounds[1], is_exclusive=False, is_integer=True)
        types = "integer" if schema.get("type") == "integer" else [*_NO_NUMBERS, "integer"]
        yield "allOf", [{"type": types, "minimum": low, "maximum": high}]
    elif name in OF_LLGUIDANCE:
        yield "format", name
    elif name in STANDARD and pattern is None:
        yield "pattern", _written(_whole(STANDARD[name]))
    elif name in STANDARD and pattern_with_format(schema, patterns) is None:
        yield "allOf", [{"pattern": _written(_whole(STANDARD[name]))}]
    elif name in OF_LIBRARIES and pattern is None:
        yield "pattern", _written(_whole(OF_LIBRARIES[name]))


def pattern_with_format(schema: dict[str, Any], patterns: PatternTranslator) -> str | None:
    """One regular expression that enforces both the pattern and the format of `schema`; None if
    they are enforced separately."""
    pattern, name = schema.get("pattern"), schema.get("format")
    if not isinstance(pattern, str) or not isinstance(name, str) or name not in STANDARD:
        return None
    for forms in (STANDARD, LOCAL):
        if name in forms:
            try:
                together = patterns.intersected([pattern, _whole(forms[name])])
            except ValueError:
                return None
            if together != NOTHING:
                return together
    return None


def _whole(expression: str) -> str:
    return f"^(?:{expression})$"


@cache
def _written(pattern: str) -> str:
    return written(parsed(pattern))
