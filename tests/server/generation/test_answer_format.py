"""What a body says of its answer's form, under all the names that clients use."""

from typing import Any

import pytest
from pydantic import ValidationError

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.server.generation.answer_format import format_of_response, labels_of_format
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hello", **fields})


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user"}], **fields})


def format_of(**fields: Any) -> StructuredOutputsParams | None:
    """The same for completions and chat."""
    found = completion(**fields).answer_format()
    assert found == chat(**fields).answer_format()
    return found


def schema_format(**more: Any) -> dict[str, Any]:
    named = {"name": "thing", "schema": SCHEMA, "strict": True} | more
    return {"type": "json_schema", "json_schema": named}


TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
        ({"response_format": schema_format()}, {"json": SCHEMA}),
        ({"response_format": schema_format(strict=False, description="x")}, {"json": SCHEMA}),
        ({"response_format": schema_format(strict=None, name=None)}, {"json": SCHEMA}),
        ({"response_format": TAG}, {"structural_tag": TAG}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, {"regex": "a+"}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
        ({"structured_outputs": {"choice": ["a"], "json": None}}, {"choice": ["a"]}),
        ({"structured_outputs": {"regex": "a", "backend": "xgrammar"}}, {"regex": "a"}),
        ({"structured_outputs": {"grammar": "a", "disable_fallback": True}}, {"grammar": "a"}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, {"regex": "a"}),
    ],
)
def test_every_name_says_the_same(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert format_of(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "one form; give one"),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs are both set",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "leave it out"),
        ({"response_format": {}}, "response_format", "response_format.type is None"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml', but must be 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "json_schema.schema is None",
        ),
        (
            {"response_format": schema_format(strict="yes")},
            "response_format",
            "json_schema.strict is 'yes', but must be true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": SCHEMA}}},
            "response_format",
            "json_schema.schema is None, but must be a JSON schema, as an object; 'shema' is no",
        ),
        (
            {"response_format": schema_format() | {"schema": {"type": "array"}}},
            "response_format",
            "response_format.json_schema.schema are both set and differ",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format",
            "response_format has a schema, but its type is 'text'",
        ),
        (
            {"response_format": schema_format() | {"type": "json_object"}},
            "response_format",
            "response_format has a schema, but its type is 'json_object'",
        ),
        (
            {"response_format": {"type": "json_object", "schema": True}},
            "response_format",
            "response_format.schema is True, but must be a JSON schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "has none of json, regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "has regex and choice",
        ),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs", "did you mean regex?"),
        (
            {"structured_outputs": {"regex": 5}},
            "structured_outputs",
            "structured_outputs.regex is 5, but must be a text",
        ),
        (
            {"structured_outputs": {"choice": ["a", 5]}},
            "structured_outputs",
            "choice is ['a', 5], but must be a list of texts",
        ),
        ({"guided_choice": []}, "guided_choice", "guided_choice is [], but must be a list"),
    ],
)
def test_invalid_answer_formats_are_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    for body in (completion(**fields), chat(**fields)):
        with pytest.raises(InvalidRequestError) as raised:
            body.answer_format()
        assert raised.value.param == param
        assert words in str(raised.value)


@pytest.mark.parametrize("field", ["guided_regex", "guided_grammar", "guided_choice"])
def test_the_older_names_have_types(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        completion(**{field: 5})


def test_the_form_arrives_in_the_params_of_a_completion_and_in_the_call_of_a_chat() -> None:
    wanted = StructuredOutputsParams(regex="a+")
    assert completion(guided_regex="a+").to_params().sampling.structured_outputs == wanted
    body = chat(guided_regex="a+")
    assert body.to_chat_call().answer_format == wanted
    assert body.to_params().sampling.structured_outputs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_beam_search_has_no_form(fields: dict[str, Any]) -> None:
    (name,) = fields
    for body in (completion(use_beam_search=True, **fields), chat(use_beam_search=True, **fields)):
        with pytest.raises(
            InvalidRequestError, match=f"{name} is .* use_beam_search does not support"
        ) as raised:
            body.to_params()
        assert raised.value.param == name
    assert completion(use_beam_search=True, response_format={"type": "text"}).to_params().beams


def test_the_form_as_text_generation_inference_has_it() -> None:
    for kind in ("json", "json_object"):
        wanted = completion(response_format={"type": kind, "value": SCHEMA}).answer_format()
        assert wanted == StructuredOutputsParams(json=SCHEMA)
    wanted = completion(response_format={"type": "regex", "value": "a+"}).answer_format()
    assert wanted == StructuredOutputsParams(regex="a+")
    with pytest.raises(InvalidRequestError, match="has a value, but its type is 'text'"):
        completion(response_format={"type": "text", "value": SCHEMA}).answer_format()


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "name": "n", "strict": True},
        schema_format() | {"schema": SCHEMA},
    ],
)
def test_a_schema_beside_the_type_is_obeyed(form: dict[str, Any]) -> None:
    wanted = format_of_response(form)
    assert wanted is not None and wanted.json == SCHEMA
    assert labels_of_format(form) == []


def test_labels_of_a_format_are_named() -> None:
    form = schema_format(title="t", note=None) | {"id": 1, "strict": True}
    assert labels_of_format(form) == ["response_format.id", "response_format.json_schema.title"]
    assert labels_of_format(None) == labels_of_format({"type": "structural_tag", "x": 1}) == []
