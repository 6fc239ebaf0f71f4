"""The base class of the JSON bodies of all APIs.

A body with an unknown or unsupported field is refused with an error that names the field. Some
routes ignore unknown fields and name them in a header of the answer. A field that is null counts as
left out. The OpenAPI document describes this, too. `generation.body` and the routes define the
fields.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from quire.errors import InvalidRequestError, did_you_mean
from quire.server.limits import CallLimits, too_many_entries

NOT_SUPPORTED = "not supported yet"
"""The OpenAPI document's description of a field that is refused."""

HINT = "accepted; it changes no token"
"""The OpenAPI document's description of a field that may have any value."""

MAX_INNER_FIELDS = 100
"""Maximum number of fields of an object in a body. Bounds the search for the known names that
unknown fields may misspell."""

UnknownFields: TypeAlias = Literal["refuse", "ignore"]
"""How unknown fields are handled."""


def _describe(schema: dict[str, Any], body: type[Any]) -> None:
    """Add to a body's JSON schema the fields and values that `Body` accepts in addition to the
    declared ones."""
    if body.unknown_fields == "ignore":
        schema["additionalProperties"] = True
    properties = schema.setdefault("properties", {})
    for name, found in properties.items():
        if note := body.note_of(name):
            found["description"] = note
        if name not in schema.get("required", ()):
            properties[name] = _allow_null(found)
    for name, harmless in body.not_supported.items():
        properties[name] = {"enum": [*harmless, None], "description": NOT_SUPPORTED}
    for name in sorted(body.hints):
        properties[name] = {"description": HINT}
    if body.takes_extra_body:
        properties["extra_body"] = {
            "type": ["object", "null"],
            "description": "its fields count as if they stood beside it",
        }


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        null = {"type": "null"}
        return schema if null in schema["anyOf"] else schema | {"anyOf": [*schema["anyOf"], null]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return schema


class Body(BaseModel):
    """The base class of request bodies: a JSON object with declared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe)
    #: Fields of other APIs that quire does not support. The listed values are accepted without
    #: effect.
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    #: Fields of other APIs that change no token and that callers do not rely on. Any value is
    #: accepted.
    hints: ClassVar[frozenset[str]] = frozenset()
    #: Whether the caller may also put the fields into an object `extra_body`.
    takes_extra_body: ClassVar[bool] = False
    #: Descriptions of fields, a line each, for the OpenAPI document and /docs. They are inherited.
    notes: ClassVar[Mapping[str, str]] = {}
    #: Fields with a bounded number of entries, with the name of the bound in CallLimits.
    list_bounds: ClassVar[Mapping[str, str]] = {}
    #: How unknown fields are handled if the operator has not configured it. "ignore" lists them in
    #: a header of the answer.
    unknown_fields: ClassVar[UnknownFields] = "refuse"
    #: Maximum number of JSON values at all depths. Values such as tools become prompt text, and
    #: writing them as JSON blocks the event loop.
    max_values: ClassVar[int] = 100_000

    @classmethod
    def without_unknown(cls, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The fields that validation handles, by accepting or refusing them, and the names of
        unknown fields."""
        if cls.takes_extra_body and "extra_body" in fields:
            fields = _flattened(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        known = {name: value for name, value in given.items() if cls._knows(name)}
        return known, [name for name in given if name not in known]

    @classmethod
    def without_unknown_inside(cls, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Like `without_unknown`, for nested bodies that ignore unknown fields. Names that seem to
        misspell a known field are kept, so that validation refuses them."""
        fields = _flattened(fields) if cls.takes_extra_body and "extra_body" in fields else fields
        kept, unknown = dict(fields), []
        for name, kind in _inner_bodies(cls).items():
            value = fields.get(name)
            if isinstance(value, dict) and kind.unknown_fields == "ignore":
                if len(value) > MAX_INNER_FIELDS:
                    raise too_many_entries(name, value, MAX_INNER_FIELDS)
                kept[name], names = kind.without_unknown(value)
                misspelt = [each for each in names if did_you_mean(each, kind.model_fields)]
                kept[name] |= {each: value[each] for each in misspelt}
                unknown += [f"{name}.{each}" for each in names if each not in misspelt]
        return kept, unknown

    @classmethod
    def needs_model(cls, fields: Mapping[str, Any]) -> bool:
        """Whether a call with this body needs its model in memory. `fields` are parsed JSON."""
        return "model" in cls.model_fields

    @classmethod
    def model_named(cls, fields: Mapping[str, Any]) -> Any:
        """The value of the field `model`, of any type; None if it is left out."""
        extra = fields.get("extra_body")
        inner = extra if cls.takes_extra_body and isinstance(extra, dict) else {}
        name = fields.get("model")  # null counts as left out
        return inner.get("model") if name is None else name

    @classmethod
    def note_of(cls, field: str) -> str | None:
        """The note of a field, if it has one."""
        for kind in cls.__mro__:
            if field in (notes := kind.__dict__.get("notes", {})):
                return str(notes[field])
        return None

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        """Check the lengths of lists and objects before their content is examined.

        `fields` are parsed JSON, with values of any kind. `max_model_len` is the engine's.
        Subclasses add further bounds. Raises InvalidRequestError that names the field and the
        bound; PromptTooLongError.
        """
        for name, bound_name in cls.list_bounds.items():
            value, bound = fields.get(name), getattr(limits, bound_name)
            if isinstance(value, (list, dict)) and len(value) > bound:
                raise too_many_entries(name, value, bound)

    @model_validator(mode="before")
    @classmethod
    def _select_known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if cls.takes_extra_body and "extra_body" in body:
            body = _flattened(body)
        kept = {}
        for name, value in body.items():
            if not cls._takes(name, value):
                raise InvalidRequestError(cls._refusal(name), name)
            if name in cls.model_fields and value is not None:
                is_whole = name in _whole_number_fields(cls)
                kept[name] = with_whole_numbers(value) if is_whole else value
        return kept

    @classmethod
    def _takes(cls, name: str, value: Any) -> bool:
        """Whether a field is known, or has a value that means the same as leaving it out."""
        is_nothing = value is None or _is_among(value, cls.not_supported.get(name, ()))
        return is_nothing or name in cls.model_fields or name in cls.hints

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name in cls.model_fields or name in cls.hints or name in cls.not_supported

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in cls.not_supported:
            return f"{name} is not supported yet; leave it out"
        hint = did_you_mean(name, cls.model_fields) or "; leave it out"
        return f"unknown field {name!r:.80}{hint}"


@cache
def _inner_bodies(kind: type[Body]) -> Mapping[str, type[Body]]:
    """The fields of a body whose values are bodies themselves."""
    return {
        name: inner
        for name, field in kind.model_fields.items()
        for inner in _types_in(field.annotation)
        if isinstance(inner, type) and issubclass(inner, Body)
    }


@cache
def _whole_number_fields(kind: type[Body]) -> frozenset[str]:
    """The names of a body's fields whose numbers, or lists of numbers, must all be integers."""
    types = {name: set(_types_in(field.annotation)) for name, field in kind.model_fields.items()}
    return frozenset(name for name, found in types.items() if int in found and float not in found)


def with_whole_numbers(value: Any) -> Any:
    """`value` with each float like 8.0 replaced by 8, since some clients write all numbers as
    floats."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [with_whole_numbers(each) for each in value]
    return value


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types that a value may have. Unions and lists are split into their types."""
    if get_origin(annotation) in (Union, UnionType, Annotated, list):
        for inner in get_args(annotation):
            yield from _types_in(inner)
    else:
        yield annotation


def _flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the fields of its extra_body moved to the top level."""
    fields = {name: value for name, value in body.items() if name != "extra_body"}
    extra = body["extra_body"]
    if extra is None:
        return fields
    if not isinstance(extra, dict):
        raise InvalidRequestError(
            f"extra_body is a {type(extra).__name__}, but must be an object with further fields",
            "extra_body",
        )
    for name in extra:
        if fields.get(name) is not None:
            raise InvalidRequestError(
                f"{name} is given both at the top level and in extra_body; give it once", name
            )
    return fields | extra


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether `value` is equal to one of `values` and of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)
