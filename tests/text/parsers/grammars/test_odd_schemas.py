"""Tools with odd schemas: what their grammars allow obeys them, or they are refused by name."""

import json
from typing import Any

import jsonschema
import pytest
from tests.text.parsers.dialect_samples import events_of
from tests.text.parsers.grammars.random_walk import (
    END,
    phrases_of,
    tokenizer_without_marks,
    walk,
)

from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.message_events import CallArguments, CallEnd
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

DIALECTS = ("hermes", "pythonic", "gemma4", "glm", "qwen3_coder")
LETTER = {"enum": ["p", "q"]}
MARKS = {"const": "</arg_value></parameter>"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = tokenizer_without_marks()
    end = tokenizer.encode(END, add_special_tokens=False)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, end)


def arguments_of(
    compiler: GrammarCompiler, name: str, schema: dict[str, Any], *, is_strict: bool, seed: int
) -> list[Any]:
    """Of the whole calls in a random message."""
    dialect = find_dialect(None, name)
    use = ToolUse((Tool("f", None, schema, is_strict),), ToolMode.REQUIRED)
    grammar = dialect.grammar(use, tokenizer=compiler.tokenizer)
    assert grammar is not None
    text, has_ended = walk(compiler, grammar, phrases_of(dialect), seed, 150)
    events = events_of(dialect, [text], tool_use=use)
    ends = [event for event in events if isinstance(event, CallEnd)]
    assert ends or not has_ended, text
    texts = [""] * (len(ends) + 1)
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    return [json.loads(texts[end.index]) for end in ends]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "x",
    [
        {"$ref": "#/$defs/letter", "enum": ["p"]},
        {"type": "string", "enum": ["a", 1]},
        {"anyOf": [LETTER, {"type": "null"}], "type": "string"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string"}, LETTER]},
        {"type": "object", "properties": {"k.1": MARKS, "n": {}}, "required": ["k.1"]},
        {"type": "array", "items": MARKS, "minItems": 1, "maxItems": 2},
        {"const": '<|"|>'},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
    ],
    ids=lambda x: json.dumps(x)[:40],
)
def test_generated_calls_are_parsed_and_obey_the_schema(
    compiler: GrammarCompiler, name: str, x: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {"x": x},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"letter": LETTER},
    }
    try:
        for seed in range(2):
            for found in arguments_of(compiler, name, schema, is_strict=True, seed=seed):
                jsonschema.validate(found, schema)
    except InvalidRequestError as error:
        assert "parameters" in str(error)


@pytest.mark.parametrize("name", DIALECTS)
def test_enforceable_parts_of_a_loose_tools_schema_are_obeyed(
    compiler: GrammarCompiler, name: str
) -> None:
    """One keyword without a grammar, or one name, does not set the others free."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "x-y": {"type": "integer"},
            "b": {"oneOf": [{"type": "integer"}, {"type": "number", "not": {"const": 3}}]},
            "kind": LETTER,
        },
        "required": ["kind"],
    }
    for seed in range(3):
        for found in arguments_of(compiler, name, schema, is_strict=False, seed=seed):
            assert found["kind"] in ("p", "q")
            assert all(type(each) is int for each in found.get("a", ()) if name == "hermes")


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("wrong", [5, None, "x", [1], {"a": 3}, 1.5])
def test_a_schema_that_is_none_is_refused_or_left_out(
    compiler: GrammarCompiler, name: str, wrong: Any
) -> None:
    for keyword in ("properties", "required", "type", "enum", "anyOf", "$ref", "minItems"):
        for schema in ({keyword: wrong}, {"properties": {"x": {"type": "array", keyword: wrong}}}):
            for is_strict in (False, True):
                try:
                    arguments_of(compiler, name, schema, is_strict=is_strict, seed=0)
                except InvalidRequestError as error:
                    assert is_strict or keyword == "type", error
