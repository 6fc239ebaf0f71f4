"""What keywords that llguidance lacks are turned into, and where they are refused."""

from typing import Any

import pytest

from quire.text.grammars.schemas.equivalents.equivalent import equivalent
from quire.text.grammars.schemas.equivalents.unique import MAX_ARRAYS
from quire.text.grammars.schemas.patterns.translation import PatternTranslator

NO_NULL = ["array", "boolean", "number", "object", "string"]


def of(keyword: str, value: Any, **others: Any) -> Any:
    definitions = {"#letters": {"enum": ["a", "b"]}, "#loop": {"$ref": "#loop"}}
    return equivalent(
        keyword,
        {keyword: value, **others},
        lambda part: definitions[part["$ref"]],
        PatternTranslator("json"),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "string"}, True),
        ({"title": "names", "x-order": 1}, True),
        (True, True),
        (False, []),
        ({"type": "integer"}, []),
        ({"minLength": 3, "maxLength": 2}, []),
        ({"const": "a"}, ["a"]),
        ({"type": "string", "enum": ["b", 1, "a", "b"]}, ["b", "a"]),
        ({"$ref": "#letters"}, ["a", "b"]),
        ({"anyOf": [{"$ref": "#letters"}, {"const": "c"}]}, ["a", "b", "c"]),
        ({"anyOf": [{"$ref": "#letters"}, {}]}, True),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"]),
    ],
)
def test_names_that_are_listed(value: Any, expected: Any) -> None:
    found = of("propertyNames", value)
    if expected is True:
        assert found is True
    else:
        closed = {"properties": dict.fromkeys(expected, True), "additionalProperties": False}
        assert found == closed


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"pattern": "^k"}, "^k"),
        ({"minLength": 2}, r"^[\s\S]{2,}$"),
        ({"anyOf": [{"pattern": "^k"}, {"const": "a.b"}]}, r"(?:^k)|(?:^(?:a\u{2e}b)$)"),
        ({"pattern": "^a+$", "maxLength": 2}, "^(?:a|aa)$"),
    ],
)
def test_names_by_a_pattern(value: Any, pattern: str) -> None:
    (found,) = of("propertyNames", value)["patternProperties"]
    assert found == pattern


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"$ref": "#loop"}, "refers to itself"),
        ({"not": {"const": "a"}}, "not is not supported there"),
        ({"pattern": r"\p{L}", "maxLength": 3}, "look-ahead"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "only for constants"),
        ({"pattern": 1}, "must be strings"),
        ({"minLength": "2"}, "must be whole numbers"),
        ({"minLength": True}, "must be whole numbers"),
        ({"maxLength": 10**10}, "must be whole numbers"),
        ({"anyOf": [{"$ref": "#letters"}] * 2_000}, "more than 1000 parts"),
        ({"enum": 1}, "enum is not supported"),
        (1, "a schema is an object"),
    ],
)
def test_names_that_are_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        of("propertyNames", value)


@pytest.mark.parametrize(
    ("schema", "num_arrays"),
    [
        ({"items": {"enum": ["a", "b", "c"]}}, 1 + 3 + 6 + 6),
        ({"items": {"enum": [1, 1.0, True, "1"]}}, 1 + 3 + 6 + 6),
        ({"items": {"enum": [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]}}, 1 + 1),
        ({"items": {"type": ["boolean", "null"]}, "minItems": 3}, 6),
        ({"items": {"type": "integer", "minimum": 0, "maximum": 40}, "maxItems": 1.0}, True),
        ({"items": {"type": "integer", "minimum": 1, "maximum": 4}, "maxItems": 2}, 1 + 4 + 12),
        ({"items": {"$ref": "#letters"}, "minItems": 3}, 0),
        ({"items": {"enum": [*range(6)]}}, None),
        ({"items": {"enum": [*range(6)]}, "maxItems": 3}, 1 + 6 + 30 + 120),
        ({"items": {"type": "string"}}, None),
        ({"items": {"type": "integer", "minimum": 0}}, None),
        ({"items": {"$ref": "#loop"}}, None),
        ({}, None),
        ({"items": {}, "maxItems": 1}, True),
        ({"items": {"const": 1}, "prefixItems": [{"type": "string"}]}, None),
    ],
)
def test_unique_items(schema: dict[str, Any], num_arrays: Any) -> None:
    found = of("uniqueItems", True, type="array", **schema)
    if num_arrays is None or num_arrays is True:
        assert found is num_arrays
    elif num_arrays == 0:
        assert found is False
    else:
        ((only,),) = found.values()
        assert len(only["enum"]) == num_arrays <= MAX_ARRAYS


def test_unique_items_say_nothing_of_what_is_no_array() -> None:
    found = of("uniqueItems", True, items={"const": 1}, type=["array", "null"])
    assert found == {"anyOf": [{"type": ["null"]}, {"enum": [[], [1]]}]}
    assert of("uniqueItems", False) is True
    assert of("uniqueItems", {}) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, False),
        ({"title": "nothing"}, False),
        (True, False),
        (False, True),
        ({"type": "null"}, {"type": NO_NULL}),
        ({"type": ["number", "string"]}, {"type": ["array", "boolean", "null", "object"]}),
        ({"type": "integer"}, None),
        ({"const": "a"}, {"pattern": "^(?!^(?:a)$)"}),
        ({"enum": ["a", None]}, {"pattern": "^(?!^(?:a)$)", "type": NO_NULL}),
        ({"const": 1}, None),
        ({"pattern": "a"}, None),
        ({"properties": {}}, None),
    ],
)
def test_opposites(value: Any, expected: Any) -> None:
    assert of("not", value) == expected
