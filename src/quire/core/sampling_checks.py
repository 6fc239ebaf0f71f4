"""Checks of sampling parameters: each returns a plain Python value or raises InvalidRequestError.

The error names the field, the value and the bound. Numbers and lists may be NumPy's or torch's.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InvalidRequestError, check_characters, shown

MAX_STOP_STRINGS = 64
MAX_LOGPROB_TOKEN_IDS = 128


class NumberBounds(NamedTuple):
    """The values that a numeric parameter may have."""

    #: The smallest value allowed.
    low: float
    #: The largest value allowed; None means no upper bound.
    high: float | None = None
    #: Whether the parameter may also be None.
    is_optional: bool = True

    def schema(self) -> dict[str, float]:
        """The bounds as keywords of a JSON schema."""
        return {"minimum": self.low} | ({} if self.high is None else {"maximum": self.high})


LOGIT_BIAS_BOUNDS = NumberBounds(-100, 100)


def as_python(value: Any) -> Any:
    """Convert a number or an array of NumPy or torch to Python's own type; return other values as
    they are."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def whole_number(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number of any type; bools return None."""
    plain = as_python(value)
    if isinstance(plain, bool):
        return None
    try:
        return int(operator.index(plain))
    except TypeError:
        return None


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    is_optional: bool = True,
) -> float | None:
    """Return a number within bounds; None is allowed if is_optional."""
    if value is None:
        _none_or_refuse(name, is_optional)
        return None
    plain = as_python(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be a number", name)
    if not low <= plain <= high:  # also refuses NaN
        raise InvalidRequestError(
            f"{name} is {plain!r}, but must be at least {low:g} and at most {high:g}", name
        )
    return plain


def _none_or_refuse(name: str, is_optional: bool) -> None:
    if not is_optional:
        raise InvalidRequestError(f"{name} is None, but must be a number", name)


def integer(
    name: str, value: Any, low: int, high: int | None, *, is_optional: bool = True
) -> int | None:
    """Return a whole number within bounds; None is allowed if is_optional."""
    if value is None:
        _none_or_refuse(name, is_optional)
        return None
    whole = whole_number(value)
    if whole is None:
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be a whole number", name)
    if whole < low or (high is not None and whole > high):
        bound = f"at least {low}" + (f" and at most {high}" if high is not None else "")
        raise InvalidRequestError(f"{name} is {whole!r}, but must be {bound}", name)
    return whole


def kind_of(name: str, kind: type, is_optional: bool, value: Any) -> Any:
    """Return an object of the class; None is allowed if is_optional."""
    if isinstance(value, kind) or (value is None and is_optional):
        return value
    raise InvalidRequestError(f"{name} is {shown(value)}, but must be a {kind.__name__}", name)


def one_of(name: str, known: Sequence[str], value: Any) -> str | None:
    """Return one of the known texts, or None."""
    if value is None or (isinstance(value, str) and value in known):
        return value
    raise InvalidRequestError(
        f"{name} is {shown(value)}, but must be {' or '.join(map(repr, known))}", name
    )


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be True or False", name)
    return value


def strings(name: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{name} is {values!r}, but must be a list of strings", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(
                f"{name} contains {shown(value)}, but each must be a non-empty string", name
            )
        check_characters(value, name)
    return tuple(values)


def stop_strings(value: Any) -> tuple[str, ...]:
    found = strings("stop", (value,) if isinstance(value, str) else value)
    if len(found) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(found)} strings, above the bound of {MAX_STOP_STRINGS}", "stop"
        )
    return found


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    listed = () if values is None else as_python(values)
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
        raise InvalidRequestError(f"{name} is {values!r}, but must be a list of token ids", name)
    found = []
    for value in listed:
        token_id = whole_number(value)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(
                f"{name} contains {shown(value)}, but each must be a token id (0 or more)", name
            )
        found.append(token_id)
    return tuple(found)


def allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    found = token_ids("allowed_token_ids", value)
    if not found:
        raise InvalidRequestError(
            "allowed_token_ids is empty, so no token could be generated; name at least one",
            "allowed_token_ids",
        )
    return found


def logprob_token_ids(value: Any) -> tuple[int, ...] | None:
    """The tokens whose log-probabilities are wanted; None if the most likely tokens are wanted."""
    if value is None:
        return None
    found = token_ids("logprob_token_ids", value)
    if not 1 <= len(found) <= MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequestError(
            f"logprob_token_ids has {len(found)} tokens, but must have from 1 to"
            f" {MAX_LOGPROB_TOKEN_IDS}",
            "logprob_token_ids",
        )
    return found


def logit_bias(values: Any) -> Mapping[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {values!r}, but must map token ids to numbers", "logit_bias"
        )
    biases: dict[int, float] = {}
    for key, value in values.items():
        token_id = whole_number(key)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(
                f"logit_bias has the key {shown(key)}, but keys must be token ids", "logit_bias"
            )
        bias = number("logit_bias", value, **LOGIT_BIAS_BOUNDS._asdict())
        if bias is None:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is None, but must be a number", "logit_bias"
            )
        biases[token_id] = bias
    return biases
