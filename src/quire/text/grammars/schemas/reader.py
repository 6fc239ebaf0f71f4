"""Reads a request's JSON schema: text or an object, of bounded size, with finite numbers."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from quire.text.grammars.limits import MAX_GRAMMAR_BYTES, MAX_NESTING
from quire.text.grammars.schemas.refusals import refusal


def read_schema(schema: object, origin: str) -> dict[str, Any] | bool:
    """The schema in `schema`, JSON text or its parsed value. Keywords are not checked.

    Raises InvalidRequestError that names `origin` if it is not JSON, too long or too deep.
    """
    parsed = read_json(schema, origin)
    if not isinstance(parsed, bool | dict):
        raise refusal(origin, "#", "a schema is an object, true or false")
    return parsed


def read_json(schema: object, origin: str) -> Any:
    """The parsed JSON of `schema`, a text or a value, which is converted by way of JSON text."""
    if isinstance(schema, str):
        parsed = _parsed(schema, origin)
    else:
        # Checked before json.dumps, which holds the interpreter's lock until it is finished.
        check_extent(schema, origin)
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise refusal(origin, "#", f"this is no JSON: {error}") from error
        _check_length(len(text), origin)
        parsed = json.loads(text)
    check_extent(parsed, origin)
    return parsed


def _parsed(text: str, origin: str) -> Any:
    _check_length(len(text.encode(errors="replace")), origin)

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise ValueError(f"{digits[:40]} is too large a number")
        return number

    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=finite)
    except RecursionError as error:
        raise refusal(origin, "#", f"this nests deeper than {MAX_NESTING}") from error
    except ValueError as error:
        raise refusal(origin, "#", f"this is no JSON: {error}") from error


def _check_length(length: int, origin: str) -> None:
    if length > MAX_GRAMMAR_BYTES:
        raise refusal(origin, "#", f"it has {length} bytes; it may have up to {MAX_GRAMMAR_BYTES}")


def check_extent(schema: object, origin: str) -> None:
    """Check nesting and the least possible length, level by level, without recursion."""
    level: list[object] = [schema]
    length = 0
    for _ in range(2 * MAX_NESTING):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                below.extend(value.values())
                length += sum(len(key) for key in value if isinstance(key, str))
            elif isinstance(value, list | tuple):
                below.extend(value)
            elif isinstance(value, str):
                length += len(value)
        length += len(below)
        if length > MAX_GRAMMAR_BYTES:
            raise refusal(
                origin, "#", f"it has more bytes than the {MAX_GRAMMAR_BYTES} that it may have"
            )
        if not below:
            return
        level = below
    raise refusal(origin, "#", f"objects and arrays nest deeper than {2 * MAX_NESTING}")
