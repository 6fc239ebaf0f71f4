"""The request fields that constrain the form of an answer, such as `response_format`.

These are OpenAI's `response_format`, also in the form of Hugging Face's TGI, vLLM's
`structured_outputs`, and the older `guided_*`. `answer_format` turns any of them into
StructuredOutputsParams; a body with two of them is refused. Hints such as `guided_decoding_backend`
are accepted and have no effect. Schemas, expressions and grammars are checked when they are
compiled.
"""

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, ClassVar

from pydantic import Field

from quire.core.structured_outputs import KINDS, StructuredOutputsParams
from quire.errors import InvalidRequestError, did_you_mean, shown
from quire.server.http.body import Body

FORMAT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that constrain the form of the answer. A body may have only one of them."""

_HINTS = (
    "backend",
    "disable_fallback",
    "_backend",
    "_backend_was_auto",
)
"""Keys of vLLM's structured_outputs that choose vLLM's implementation and have no effect here."""

_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "json": (str, dict),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
    "structural_tag": (str, dict),
    "disable_any_whitespace": (bool,),
    "disable_additional_properties": (bool,),
    "whitespace_pattern": (str,),
}
"""Keys of structured_outputs, with the types of their values."""

_WORDS: Mapping[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list of texts",
    bool: "true or false",
}

_TEXT: Mapping[str, Any] = {"type": ["string", "null"]}
_FLAG: Mapping[str, Any] = {"type": ["boolean", "null"]}
_CHOICE: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "string"},
}
_RESPONSE_FORMAT: Mapping[str, Any] = {
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag", "json", "regex"]},
        "value": {"type": ["object", "string"]},
        "schema": {"type": ["object", "null"]},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {
                "name": _TEXT,
                "description": _TEXT,
                "schema": {"type": "object"},
                "strict": _FLAG,
            },
        },
    },
}
_STRUCTURED_OUTPUTS: Mapping[str, Any] = {
    "additionalProperties": False,
    "properties": {
        "json": {"type": ["object", "string", "null"]},
        "regex": _TEXT,
        "choice": {**_CHOICE, "type": ["array", "null"]},
        "grammar": _TEXT,
        "json_object": _FLAG,
        "structural_tag": {"type": ["object", "string", "null"]},
        "disable_any_whitespace": _FLAG,
        "disable_additional_properties": _FLAG,
        "whitespace_pattern": _TEXT,
        **{hint: {"description": "accepted; it changes no answer"} for hint in _HINTS},
    },
}


def _left_out(schema: Mapping[str, Any]) -> Any:
    return Field(default=None, json_schema_extra=dict(schema))


class AnswerFormatFields(Body):
    """The fields of a body that constrain the form of the answer."""

    notes: ClassVar[Mapping[str, str]] = {
        "response_format": "the form of the answer: `json_object`, or the JSON schema or structural"
        " tag that it obeys",
        "structured_outputs": "the form of the answer: one of `json` (a schema), `regex`, `choice`,"
        " `grammar`, `json_object` and `structural_tag`",
        "guided_json": "older name of `json` in `structured_outputs`",
        "guided_regex": "older name of `regex` in `structured_outputs`",
        "guided_choice": "older name of `choice` in `structured_outputs`",
        "guided_grammar": "older name of `grammar` in `structured_outputs`",
        "guided_whitespace_pattern": "with `guided_json`: what may stand between the parts of JSON",
        "guided_decoding_backend": "accepted; it changes no answer",
    }

    response_format: dict[str, Any] | None = _left_out(_RESPONSE_FORMAT)
    # extensions to OpenAI's API
    structured_outputs: dict[str, Any] | None = _left_out(_STRUCTURED_OUTPUTS)
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = _left_out({"minItems": 1})
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    @property
    def labels(self) -> list[str]:
        """Names of the keys in `response_format` that have no effect on the answer."""
        return labels_of_format(self.response_format)

    def answer_format(self) -> StructuredOutputsParams | None:
        """The constraint on the answer's form; None means free text. Raises InvalidRequestError."""
        given = [name for name in FORMAT_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{given[0]} and {given[1]} are both set, but an answer has one form; give one",
                given[1],
            )
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise InvalidRequestError(
                "guided_whitespace_pattern is set, but guided_json is not; leave it out",
                "guided_whitespace_pattern",
            )
        if self.response_format is not None:
            return format_of_response(self.response_format)
        if self.structured_outputs is not None:
            return _format_of_options(self.structured_outputs)
        older = {name: getattr(self, f"guided_{name}") for name in KINDS[:4]}
        kept = {name: value for name, value in older.items() if value is not None}
        if not kept:
            return None
        _check_choice(self.guided_choice, "guided_choice")
        return StructuredOutputsParams(**kept, whitespace_pattern=self.guided_whitespace_pattern)


_SCHEMA_KEYS = ("schema", "name", "description", "strict")
_FORMAT_KEYS = ("type", "json_schema", "value", *_SCHEMA_KEYS)


def labels_of_format(given: Mapping[str, Any] | None) -> list[str]:
    """Names of the keys in a `response_format` that have no effect on the answer."""
    if given is None or given.get("type") == "structural_tag":
        return []
    named = given.get("json_schema")
    inside = named if isinstance(named, dict) else {}
    return [
        *(f"response_format.{name}" for name in _unknown(given, _FORMAT_KEYS)),
        *(f"response_format.json_schema.{name}" for name in _unknown(inside, _SCHEMA_KEYS)),
    ]


_MAX_LABELS = 100
"""Maximum number of ignored names of one object that are reported in the answer's header."""


def _unknown(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    unknown = (name for name in given if name not in known)
    return [name for name in islice(unknown, _MAX_LABELS) if given[name] is not None]


def format_of_response(
    given: Mapping[str, Any], name: str = "response_format"
) -> StructuredOutputsParams | None:
    """The constraint that OpenAI's `response_format` asks for; None if it asks for plain text.

    Error messages use `name` for the field. As in llama.cpp, the schema may also be next to `type`,
    even if the type is json_object. `strict` has no effect, since a schema is always enforced.
    Raises InvalidRequestError.
    """
    kind = given.get("type")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    if given.get("value") is not None:
        return _format_of_value(given, name)
    _refuse_other_forms(given, name)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema_of(given, name))
    if kind in ("text", "json_object"):
        if given.get("json_schema") is not None or (kind == "text" and given.get("schema")):
            raise InvalidRequestError(
                f"{name} has a schema, but its type is {kind!r}; set it to 'json_schema'", name
            )
        if given.get("schema") not in (None, {}):  # an empty schema adds nothing to the type
            return StructuredOutputsParams(json=_schema_in(given, name))
        return None if kind == "text" else StructuredOutputsParams(json_object=True)
    raise InvalidRequestError(
        f"{name}.type is {shown(kind)}, but must be 'text', 'json_object', 'json_schema' or"
        " 'structural_tag'",
        name,
    )


_OTHER_FORMS = ("grammar", "pattern", "properties", "regex")


def _refuse_other_forms(given: Mapping[str, Any], name: str) -> None:
    """Refuse an unknown key that was probably meant to constrain the answer."""
    missing = [key for key in ("json_schema", "schema") if given.get(key) is None]
    for key in _unknown(given, _FORMAT_KEYS) if len(missing) == 2 else ():
        if (hint := did_you_mean(key, missing)) or key in _OTHER_FORMS:
            raise InvalidRequestError(
                f"{name} has {key!r:.80}, which is not a form of the answer"
                f"{hint or '; give json_schema, or structured_outputs in place of it'}",
                name,
            )


def _format_of_value(given: Mapping[str, Any], name: str) -> StructuredOutputsParams:
    """The constraint in TGI's form, whose `value` is the schema or the regular expression."""
    kind, value = given.get("type"), given["value"]
    for key in ("schema", "json_schema"):
        if given.get(key) is not None:
            raise InvalidRequestError(f"{name} has both a value and {key}; give one", name)
    if kind == "regex":
        _check_type(value, (str,), f"{name}.value", name)
        return StructuredOutputsParams(regex=value)
    if kind in ("json", "json_object"):
        _check_type(value, (str, dict), f"{name}.value", name)
        return StructuredOutputsParams(json=value)
    raise InvalidRequestError(
        f"{name} has a value, but its type is {shown(kind)}; it must be 'json', 'json_object' or"
        " 'regex'",
        name,
    )


def _schema_of(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema inside of `json_schema`, or in `schema` next to it."""
    named = given.get("json_schema")
    if named is None and given.get("schema") is not None:
        return _schema_in(given, name)
    if not isinstance(named, dict):
        raise InvalidRequestError(
            f"{name}.json_schema is {shown(named)}, but must be an object with the schema in"
            " `schema`",
            name,
        )
    schema = _schema_in(named, f"{name}.json_schema")
    if given.get("schema") not in (None, schema):
        raise InvalidRequestError(
            f"{name}.schema and {name}.json_schema.schema are both set and differ; give one", name
        )
    return schema


def _schema_in(named: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema in an object that may also have a name, a description and strict."""
    field = name.partition(".")[0]
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        _check_type(named.get(key), (kind,), f"{name}.{key}", field)
    schema = named.get("schema")
    if not isinstance(schema, dict):
        near = [key for key in _unknown(named, _FORMAT_KEYS) if did_you_mean(key, ("schema",))]
        hint = f"; {near[0]!r:.80} is no name of it" if near else ""
        raise InvalidRequestError(
            f"{name}.schema is {shown(schema)}, but must be a JSON schema, as an object{hint}",
            field,
        )
    return schema


def _format_of_options(given: Mapping[str, Any]) -> StructuredOutputsParams:
    """The constraint that vLLM's `structured_outputs` asks for."""
    name = "structured_outputs"
    _refuse_unknown(given, {*_OPTIONS, *_HINTS}, name)
    kept = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
    for key, value in kept.items():
        _check_type(value, _OPTIONS[key], f"{name}.{key}", name)
    _check_choice(kept.get("choice"), f"{name}.choice")
    return StructuredOutputsParams(**kept)


def _check_choice(choice: list[Any] | None, name: str) -> None:
    if choice is None:
        return
    if not choice or not all(isinstance(text, str) for text in choice):
        raise InvalidRequestError(
            f"{name} is {shown(choice)}, but must be a list of texts, at least one",
            name.partition(".")[0],
        )


def _refuse_unknown(given: Mapping[str, Any], known: set[str], name: str) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            hint = did_you_mean(key, known) or "; leave it out"
            raise InvalidRequestError(
                f"{name} has the unknown field {key!r:.80}{hint}", name.partition(".")[0]
            )


def _check_type(value: Any, kinds: tuple[type, ...], name: str, field: str) -> None:
    """Raises InvalidRequestError unless the value is None or has one of these types."""
    if value is not None and not isinstance(value, kinds):
        words = " or ".join(_WORDS[kind] for kind in kinds)
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be {words}", field)
