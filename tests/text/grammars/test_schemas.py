"""Schemas: what is enforced, what is refused with its place, and that random answers obey."""

import json
import re
from typing import Any

import jsonschema
import pytest
from tests.text.grammars.walks import accepts, random_answer

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.schemas.keywords import REFUSED

LEAP = {"type": "string", "format": "date"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ENFORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (LEAP, ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"'], ['"2023-02-29"', '"1900-02-29"']),
    ({"type": "string", "format": "byte"}, ['"QQ=="', '""'], ['"QQ="', '"Q!=="']),
    ({"type": "integer", "format": "int32"}, ["-2147483648"], ["2147483648", "-2147483649"]),
    ({"format": "uint8"}, ["255", '"a"', "null"], ["256", "-1", "1.5"]),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"'], ['"\\n"', '"\\r"', '"ab"']),
    ({"type": "string", "pattern": r"^\S$"}, ['"a"'], ['"\ufeff"', '"\u00a0"']),
    ({"type": "string", "pattern": "^[a&&b]$"}, ['"&"', '"a"'], ['"c"']),
    ({"type": "string", "pattern": r"^\u0061[^\d]$"}, ['"ab"'], ['"a1"']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({"type": "string", "pattern": "^(?=.*a)(?!.*b)"}, ['"ca"'], ['"c"', '"ab"']),
    ({"exclusiveMinimum": True, "minimum": 3, "type": "integer"}, ["4"], ["3"]),
    (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        ["[1]"],
        ["[1,1]"],
    ),
    (
        {
            "type": "object",
            "patternProperties": {r"^\d": {"minimum": 1}, "^[0-9]": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"1": 1}'],
        ['{"1": 0}', '{"1": 1.5}', '{"a": 1}'],
    ),
    ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "kind", "mapping": {}},
            "$defs": {
                name: {"type": "object", "properties": {"kind": {"const": name}}}
                for name in ("a", "b")
            },
        },
        ['{"kind": "a"}', '{"kind": "b", "x": 1}'],
        ["{}", '{"kind": "c"}', "1"],
    ),
    (
        {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}},
        ["1"],
        [],
    ),
    ({"$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}}, ["null"], ["1"]),
    ({"$ref": "#b", "$defs": {"a": {"$anchor": "b", "const": 1}}}, ["1"], ["2"]),
    (
        {"properties": {"a~b/c": {"const": 1}}, "allOf": [{"$ref": "#/properties/a~0b~1c"}]},
        ["1"],
        ["2"],
    ),
    (
        {"properties": {"a": {"const": 1}}, "type": "object"},
        ['{"a": 1}', '{"b": 2}'],
        ['{"a": 2}', '{"\\u0061": 2}'],
    ),
    (
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["a"],
            "properties": {"a": {"type": "string"}},
        },
        ['{"a": "\\u0001"}'],
        ["{}"],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_enforced(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    params = StructuredOutputsParams(json=schema)
    for text in good:
        assert accepts(compiler, params, text), text
    for text in bad:
        assert not accepts(compiler, params, text), text


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_refused_keywords_are_named_with_their_place(keyword: str) -> None:
    schema = {"properties": {"a/b": {keyword: {"multipleOf": 3}}}}
    says = {"propertyNames": "propertyNames: multipleOf is not"}.get(keyword, f"{keyword} is not")
    with pytest.raises(InvalidRequestError, match=re.escape(f"#/properties/a~1b: {says}")):
        grammar_of(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, "#: oneOf is supported only if"),
        ({"items": {"format": ["iri"]}}, "#/items: format must be a string"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"minlength": 1}, "minlength is not a keyword; use minLength"),
        ({"any_of": [{}]}, "any_of is not a keyword; use anyOf"),
        ({"pattern": r"\bword"}, r"\\b is not supported"),
        ({"patternProperties": {"(?<=a)": {}}}, "look-behind"),
        ({"minimum": 2**64}, "minimum is beyond"),
        ({"const": [2**60 + 1]}, "const has a number beyond"),
        ({"enum": [1e300]}, "enum has a number beyond"),
        ({"type": None}, "type must be of"),
        ({"minProperties": 3}, "minProperties is more than 1 above"),
        ({"uniqueItems": True}, "uniqueItems is not supported"),
        ({"$ref": "http://example.org/x"}, "nothing is fetched"),
        ({"$ref": "#/$defs/none"}, "points at nothing"),
        ({"type": "any"}, "type must be of"),
        ({"minLength": -1}, "minLength must be a whole number"),
        ({"required": "a"}, "required must be a list"),
        ({"$schema": DRAFT_7, "contentEncoding": "base64"}, "contentEncoding"),
    ],
)
def test_refusals(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        grammar_of(StructuredOutputsParams(json=schema))


def test_annotations_and_values_without_effect_pass(compiler: GrammarCompiler) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/a",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "x-order": 1,
        "my_note": {"type": 1},
        "format": "my-own",
        "minimum": None,
        "not": False,
        "uniqueItems": False,
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": True,
        "$defs": {"unused": {"not": {}}},
        "type": "integer",
    }
    assert accepts(compiler, StructuredOutputsParams(json=schema), "1")


@pytest.mark.parametrize("seed", range(12))
def test_random_answers_obey(compiler: GrammarCompiler, seed: int) -> None:
    """Whatever the masks let through is JSON that the reference validator accepts."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": -5, "maximum": 120, "multipleOf": 5},
            "name": {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^[^x]"},
            "kind": {"enum": ["a", 1, None, {"b": [1.5]}]},
            "list": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
            "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 9.5},
        },
        "patternProperties": {"^p_": {"type": "boolean"}},
        "additionalProperties": {"type": "null"},
        "required": ["id", "kind"],
    }
    grammar = grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    answer = random_answer(compiler, grammar, seed)
    if answer is not None:
        jsonschema.validate(json.loads(answer), schema)
