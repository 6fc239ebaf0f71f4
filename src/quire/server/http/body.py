"""What the JSON bodies of all API families have in common: objects with known fields only.

A field that nobody knows, or that quire has not yet, is refused by name; null means that a field
was left out. Both are told in the OpenAPI document, too. Called by `protocol` and `tokens`, which
define the fields. Knows no API.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from quire.errors import InvalidRequestError, did_you_mean
from quire.server.http.field_notes import note_of

NOT_SUPPORTED = "not supported yet"
"""What the OpenAPI document says of a field that is refused."""


def _describe(schema: dict[str, Any], body: type[Any]) -> None:
    """Complete a body's JSON schema by what `Body` accepts beside the fields themselves."""
    properties = schema.setdefault("properties", {})
    for name, found in properties.items():
        if note := note_of(body.__name__, name):
            found["description"] = note
        if name not in schema.get("required", ()):
            properties[name] = _or_null(found)
    for name, harmless in body.not_supported.items():
        properties[name] = {"enum": [*harmless, None], "description": NOT_SUPPORTED}
    if body.takes_extra_body:
        properties["extra_body"] = {
            "type": ["object", "null"],
            "description": "its fields count as if they stood beside it",
        }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        null = {"type": "null"}
        return schema if null in schema["anyOf"] else schema | {"anyOf": [*schema["anyOf"], null]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return schema


class Body(BaseModel):
    """A JSON object with known fields only.

    not_supported: fields of others' APIs that quire has not, with the values that ask for nothing.
    takes_extra_body: whether an object `extra_body` may hold fields, as if they stood beside it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe)
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    takes_extra_body: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _keep_known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if cls.takes_extra_body and "extra_body" in body:
            body = _flattened(body)
        kept = {}
        for name, value in body.items():
            if value is None or _is_among(value, cls.not_supported.get(name, ())):
                continue
            if name not in cls.model_fields:
                raise InvalidRequestError(cls._refusal(name), name)
            kept[name] = value
        return kept

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in cls.not_supported:
            return f"{name} is not supported yet; leave it out"
        hint = did_you_mean(name, cls.model_fields) or "; leave it out"
        return f"unknown field {name!r:.80}{hint}"


def _flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the fields of its extra_body beside its own."""
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
    """Equal and of the same type: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in values)
