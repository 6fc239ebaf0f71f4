"""Which values of `format` are enforced, and how.

llguidance has expressions for some. Those for dates and times are our own: its would allow 29
February in any year, and leap seconds at any minute. Every other format is refused by name.
"""

from collections.abc import Iterator
from typing import Any

from quire.text.grammars.schemas.refusals import refusal

_LEAP_CENTURY = "(?:[02468][048]|[13579][26])"  # 00 (divided by 400 the year is whole), 04, 08, ...
_LEAP_YEAR = f"(?:{_LEAP_CENTURY}00|[0-9]{{2}}(?:0[48]|[2468][048]|[13579][26]))"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

OWN = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
"""Format -> what a whole string of it matches. Leap seconds are left out of times."""

OF_LLGUIDANCE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})

UNCONSTRAINED = frozenset({"binary", "double", "float", "password"})
"""OpenAPI's hints about how a value is stored or shown: every value of the type has them."""

_MAX_INTEGERS = {"int32": 2**31 - 1, "int64": 2**53}
"""OpenAPI's formats of integers. Grammars know numbers up to 2**53; what is beyond, they refuse."""


def enforced_format(schema: dict[str, Any], pointer: str, origin: str) -> Iterator[tuple[str, Any]]:
    """The keywords that stand for the format of `schema`, which is at `pointer`.

    Raises InvalidRequestError for one that can't be enforced.
    """
    name = schema["format"]
    if not isinstance(name, str):
        raise refusal(origin, pointer, "format must be a string")
    if name in UNCONSTRAINED:
        return
    if name in OF_LLGUIDANCE:
        yield "format", name
    elif name in OWN:
        own = {"pattern": f"^(?:{OWN[name]})$"}
        yield from [("allOf", [own])] if "pattern" in schema else own.items()
    elif name in _MAX_INTEGERS and schema.get("type") == "integer":
        bound = _MAX_INTEGERS[name]
        yield "allOf", [{"minimum": -bound, "maximum": bound}]
    else:
        known = sorted({*OWN, *OF_LLGUIDANCE, *UNCONSTRAINED, *_MAX_INTEGERS})
        raise refusal(
            origin,
            pointer,
            f"format {name[:100]!r} is not supported; those that are: {', '.join(known)}; or"
            " write a pattern",
        )
