"""Reads a request's JSON schema, a text or an object, and checks its size and numbers."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from quire.text.grammars.limits import MAX_GRAMMAR_BYTES, MAX_NESTING
from quire.text.grammars.schemas.refusals import refusal


def read_schema(schema: object, origin: str) -> dict[str, Any] | bool:
    """Read a schema, given as JSON text or as a parsed value. Keywords are not checked.

    Raises InvalidRequestError that names `origin` if the schema is not JSON, too long or too deep.
    """
    parsed = read_json(schema, origin)
    if not isinstance(parsed, bool | dict):
        raise refusal(origin, "#", "a schema is an object, true or false")
    return parsed


def read_json(schema: object, origin: str) -> Any:
    """The parsed JSON value of `schema`. A text is parsed; another value is written as JSON and
    parsed again. Raises InvalidRequestError."""
    if isinstance(schema, str):
        parsed = _parsed(schema, origin)
    else:
        # Checked before json.dumps, which holds the GIL until it is finished.
        check_extent(schema, origin)
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise refusal(origin, "#", f"this is not JSON: {error}") from error
        _check_length(len(text), origin)
        parsed = json.loads(text)
    check_extent(parsed, origin)
    return parsed


def _parsed(text: str, origin: str) -> Any:
    _check_length(len(text.encode(errors="replace")), origin)

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

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
        raise refusal(origin, "#", f"this is not JSON: {error}") from error


def _check_length(length: int, origin: str) -> None:
    if length > MAX_GRAMMAR_BYTES:
        raise refusal(origin, "#", f"it has {length} bytes; it may have up to {MAX_GRAMMAR_BYTES}")


def check_extent(schema: object, origin: str) -> None:
    """Raise InvalidRequestError if `schema` nests too deeply or must be too long as JSON. Works
    level by level, without recursion."""
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
                origin, "#", f"it has more than {MAX_GRAMMAR_BYTES} bytes, which is the limit"
            )
        if not below:
            return
        level = below
    raise refusal(origin, "#", f"objects and arrays nest deeper than {2 * MAX_NESTING}")
