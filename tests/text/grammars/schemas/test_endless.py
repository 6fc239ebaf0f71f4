"""Schemas of values that never end are refused; those whose values may end are not."""

from typing import Any

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.grammar_text import grammar_of

REQUIRED = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
LINK = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("definition", "place"),
    [
        (REQUIRED, "#/$defs/a"),
        ({"type": "array", "items": LINK, "minItems": 1}, "#/$defs/a"),
        ({"type": "array", "prefixItems": [{}, LINK], "minItems": 2}, "#/$defs/a"),
        ({"anyOf": [REQUIRED, {"type": "array", "items": LINK, "minItems": 2}]}, "#/$defs/a"),
        ({"allOf": [REQUIRED]}, "#/$defs/a"),
        ({"type": ["object", "array"], **REQUIRED, "minItems": 1, "items": LINK}, None),
        ({"not": {}}, "#/$defs/a"),
        ({"type": "object", "additionalProperties": LINK, "required": ["b"]}, "#/$defs/a"),
        ({"type": "object", "additionalProperties": LINK, "minProperties": 1}, "#/$defs/a"),
    ],
)
def test_endless(definition: dict[str, Any], place: str | None) -> None:
    schemas = [
        {"$defs": {"a": definition}, **LINK},
        {"$defs": {"a": definition}, "type": "object", "properties": {"x": LINK}},
    ]
    for schema in schemas:
        with pytest.raises(InvalidRequestError, match="no answer can ever complete it") as refused:
            grammar_of(StructuredOutputsParams(json=schema))
        assert place is None or f": {place}: " in str(refused.value)


def test_two_that_need_each_other() -> None:
    definitions = {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "array", "items": LINK, "minItems": 1},
    }
    with pytest.raises(InvalidRequestError, match="no answer can ever complete it"):
        grammar_of(StructuredOutputsParams(json={"$defs": definitions, **LINK}))


@pytest.mark.parametrize(
    "definition",
    [
        {**REQUIRED, "type": ["object", "null"]},
        {**REQUIRED, "required": []},
        {"properties": REQUIRED["properties"], "required": ["next"]},
        {"anyOf": [REQUIRED, {"type": "null"}]},
        {"type": "array", "items": LINK},
        {"type": "array", "prefixItems": [LINK]},
        {"type": "object", "additionalProperties": LINK},
        {
            "type": "object",
            "additionalProperties": LINK,
            "properties": {"b": {}},
            "required": ["b"],
        },
        {
            "type": "object",
            "additionalProperties": LINK,
            "patternProperties": {"^b": {}},
            "required": ["b"],
        },
        {"type": "object", "properties": {"next": {"anyOf": [LINK, {"type": "null"}]}}},
    ],
)
def test_schemas_with_a_finite_value_are_accepted(definition: dict[str, Any]) -> None:
    assert grammar_of(StructuredOutputsParams(json={"$defs": {"a": definition}, **LINK}))
