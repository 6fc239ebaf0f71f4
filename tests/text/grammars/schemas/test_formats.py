"""Formats beside patterns and types: which of the two is enforced."""

import re
from typing import Any

import pytest
from tests.text.grammars.walks import accepts

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.schemas.formats import pattern_with_format
from quire.text.grammars.schemas.patterns.languages import NOTHING
from quire.text.grammars.schemas.patterns.translation import PatternTranslator


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # JSON Schema's own: both hold.
        (
            {"format": "date", "pattern": "^2024"},
            ['"2024-02-29"'],
            ['"2023-01-01"', '"2024-99-99"'],
        ),
        ({"format": "time", "pattern": "^12"}, ['"12:00:00Z"'], ['"12:00"', '"11:00:00Z"']),
        ({"format": "email", "pattern": "^a"}, ['"a@b.co"'], ['"a"', '"b@b.co"']),
        # The pattern leaves no offset, so the time is a local one.
        ({"format": "time", "pattern": "^[0-9:]+$"}, ['"12:00:00"'], ['"25:00:00"', '"12:00:00Z"']),
        ({"format": "date-time", "pattern": "^[0-9T:-]{16}$"}, ['"2024-02-29T12:00"'], ['"2024"']),
        # Those of libraries: the pattern says it.
        ({"format": "nanoid", "pattern": "^[a-z]{3}$"}, ['"abc"'], ['"abcd"']),
        ({"format": "uuid4"}, ['"a1b2c3d4-0000-4000-8000-0123456789ab"'], ['"a"']),
        # Any other name, and formats of other types.
        ({"format": "my-own"}, ['"a"'], []),
        ({"format": "int32"}, ['"a"', "1"], ["2147483648"]),
        ({"type": "number", "format": "date"}, ["1.5"], ['"2024-02-29"']),
        ({"type": "number", "format": "int8"}, ["-128"], ["1.5", "128"]),
    ],
)
def test_format(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    params = StructuredOutputsParams(json=schema)
    for text in good:
        assert accepts(compiler, params, text), text
    for text in bad:
        assert not accepts(compiler, params, text), text


def test_a_pattern_that_no_date_has() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^x"}
    with pytest.raises(InvalidRequestError, match="Regex is empty"):
        grammar_of(StructuredOutputsParams(json=schema))


def test_pattern_and_format_become_one_expression() -> None:
    """llguidance compares the members of an intersection with each other at every character."""
    patterns = PatternTranslator("json")
    together = pattern_with_format({"format": "date", "pattern": "^2024-0[12]"}, patterns)
    assert together is not None
    assert re.fullmatch(together, "2024-02-29")
    assert not re.fullmatch(together, "2024-02-30")
    assert pattern_with_format({"format": "date", "pattern": r"\p{L}"}, patterns) is None
    assert patterns.intersected(["^a", "^b"]) == NOTHING
