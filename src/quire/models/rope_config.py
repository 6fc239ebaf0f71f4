"""Reads the rope type and its parameters from a config.json.

Supports the forms of transformers 4 (`rope_scaling` and `rope_theta`) and 5 (`rope_parameters`).
The parameters of a rope type are the fields of its dataclass in `layers.rotary`, so a new rope type
needs no change here.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.hub.model_files import shown_name
from quire.layers.rotary import ROPE_TYPES, Rope
from quire.models.config_bounds import checked_integer, checked_number
from quire.models.config_fields import ROPE_FORMS, ConfigFields

_DEFAULT_THETA = 10000.0
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_OF_ANY_LENGTH = ("default", "linear")
"""Rope types for which transformers ignores an original length in the config."""
_PARTIAL = "partial_rotary_factor"
_FACTOR_LISTS = ("short_factor", "long_factor")


def read_rotary_dim(config: ConfigFields, *, head_dim: int, default_factor: float) -> int:
    """The number of elements of a head that rotate: partial_rotary_factor * head_dim, rounded down.

    `default_factor` is used if the config has no factor. Raises CheckpointError for a malformed
    factor, or if the number of elements is odd.
    """
    inner = read_rope_parameters(config).get(_PARTIAL)
    factor = config.number(_PARTIAL, default_factor)
    if inner is not None:
        # As in transformers, the rope parameters take precedence.
        factor = checked_number(f"config.json: {_PARTIAL}", _PARTIAL, inner)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: {_PARTIAL} is {factor:g}, by which {rotary_dim} elements of a head of "
            f"{head_dim} would rotate, but it must be an even number of them, at least 2"
        )
    return rotary_dim


def read_rope(
    config: ConfigFields,
    *,
    head_dim: int,
    max_position_embeddings: int,
    rotary_dim: int | None = None,
) -> Rope:
    """Read the rope type and its parameters.

    `rotary_dim` is the result of `read_rotary_dim`, or None for a family that rotates whole heads.
    Raises UnsupportedModelError for an unknown rope type or parameter, and CheckpointError for a
    missing or malformed parameter.
    """
    # First, find the type.
    theta = config.number("rope_theta", _DEFAULT_THETA)
    original_length = config.optional_integer(_ORIGINAL_LENGTH)
    raw = read_rope_parameters(config)
    rope_type = raw.pop("rope_type", None) or raw.get("type", "default")
    raw.pop("type", None)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"config.json: the rope type is {shown(rope_type)}, but only {', '.join(ROPE_TYPES)} "
            "are understood"
        )
    # Then, complete the parameters, and drop those that transformers ignores.
    known = {field.name: field for field in fields(ROPE_TYPES[rope_type])}
    has_no_part = _PARTIAL not in known and raw.pop(_PARTIAL, 1.0) != 1.0
    if has_no_part and rotary_dim is None:
        raise UnsupportedModelError(
            "config.json: partial_rotary_factor is below 1, but only heads that rotate as a whole "
            "are understood"
        )
    raw.setdefault("rope_theta", theta)
    if _ORIGINAL_LENGTH in known:
        # As in transformers, a field outside the rope parameters takes precedence. Phi-3 has such a
        # field.
        inner = raw.get(_ORIGINAL_LENGTH, max_position_embeddings)
        raw[_ORIGINAL_LENGTH] = original_length or inner
    elif rope_type in _OF_ANY_LENGTH:
        raw.pop(_ORIGINAL_LENGTH, None)
    for name in [each for each in raw if each not in known]:  # in the file's order
        if config.leaves_out(ROPE_FORMS[-1], name):
            del raw[name]
    # Last, check names and values.
    _check_names(rope_type, set(raw), known)
    size = head_dim if rotary_dim is None else rotary_dim
    values = {name: _value(rope_type, name, value, size) for name, value in raw.items()}
    if values.get("high_freq_factor", 2.0) <= values.get("low_freq_factor", 1.0):
        raise CheckpointError(
            f"config.json: high_freq_factor of the rope type {rope_type!r} is "
            f"{values['high_freq_factor']:g}, but must be above low_freq_factor, "
            f"{values['low_freq_factor']:g}"
        )
    if rope_type == "dynamic" and size == 2:
        raise UnsupportedModelError(
            "config.json: the rope type 'dynamic' needs heads of which more than 2 elements "
            "rotate, since its formula divides by their number less 2"
        )
    return ROPE_TYPES[rope_type](**values)


def read_rope_parameters(config: ConfigFields) -> dict[str, Any]:
    """A copy of the rope parameters, in the form of either version, without nulls."""
    scaling, parameters = map(config.value, ROPE_FORMS)
    raw = scaling or parameters or {}
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"config.json: the rope parameters are {shown(raw)}, but must be an object"
        )
    return {name: value for name, value in raw.items() if value is not None}


def of_one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters without the sections for time, height and width.

    A text token has the same position on all three axes, so the sections don't affect it.
    """
    plain = {name: rope[name] for name in rope if not name.startswith("mrope_")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def _check_names(rope_type: str, given: set[str], known: dict[str, Any]) -> None:
    unknown = sorted(given - known.keys())
    if unknown:
        names = ", ".join(map(shown_name, unknown))
        raise UnsupportedModelError(
            f"config.json: the rope type {rope_type!r} has {names}, but only {', '.join(known)} "
            "are understood"
        )
    required = {name for name, field in known.items() if field.default is MISSING}
    missing = sorted(required - given)
    if missing:
        raise CheckpointError(
            f"config.json: the rope type {rope_type!r} needs {', '.join(missing)}, but has only "
            f"{', '.join(sorted(given))}"
        )


def _value(rope_type: str, name: str, value: Any, rotary_dim: int) -> Any:
    """Check the value of a parameter. `rotary_dim` is the number of rotating elements."""
    what = f"config.json: {name} of the rope type {rope_type!r}"
    if name == "truncate":
        if not isinstance(value, bool):
            raise CheckpointError(f"{what} is {shown(value)}, but must be true or false")
        return value
    if name in _FACTOR_LISTS:
        if not isinstance(value, list) or len(value) != rotary_dim // 2:
            raise CheckpointError(
                f"{what} is {shown(value)}, but must be a list of {rotary_dim // 2} numbers, half "
                "of the elements of a head that rotate"
            )
        return tuple(checked_number(f"an entry of {what}", name, entry) for entry in value)
    if name == _ORIGINAL_LENGTH:
        # Some configs write the length as 8192.0.
        is_whole = isinstance(value, float) and value.is_integer()
        return checked_integer(what, name, int(value) if is_whole else value)
    return checked_number(what, name, value)
