"""What each kind of structured output accepts, and what is refused before any token is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.grammars.walks import accepts

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"regex": "a/b|^x$"}, ["a/b", "x"], ["a", "xx", ""]),
        ({"regex": ""}, [""], ["a"]),
        ({"choice": ["yes", "no", "", 'q"\\']}, ["yes", "no", "", 'q"\\'], ["y", "yesno"]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["[]", "1", ""]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a1", "a12"], ["a", "1"]),
        ({"grammar": 'start: "a" b\nb: /[0-9]+/'}, ["a1", "a12"], ["a", "1"]),
        ({"json": {"type": "integer"}}, ["1", "-20"], ["1.5", '"1"']),
        ({"json": '{"const": "a"}'}, ['"a"'], ['"b"']),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": " "}, ["[1, 2]"], ["[1,  2]"]),
        (
            {"json": {"properties": {"a": True}}, "disable_additional_properties": True},
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
    ],
)
def test_kinds(
    compiler: GrammarCompiler, params: dict[str, object], good: list[str], bad: list[str]
) -> None:
    asked = StructuredOutputsParams(**params)  # type: ignore[arg-type]
    for text in good:
        assert accepts(compiler, asked, text), text
    for text in bad:
        assert not accepts(compiler, asked, text), text


@settings(deadline=None, max_examples=30)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
def test_choice_accepts_exactly_its_text(compiler: GrammarCompiler, text: str) -> None:
    params = StructuredOutputsParams(choice=[text])
    assert accepts(compiler, params, text)
    assert not accepts(compiler, params, text + "a")


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
        ({"regex": "a(?=b)"}, "structured_outputs.regex", "look-ahead"),
        ({"regex": r"(a)\1"}, "structured_outputs.regex", "backreferences"),
        ({"choice": "yes"}, "structured_outputs.choice", "list"),
        ({"choice": [1]}, "structured_outputs.choice", "int"),
        ({"grammar": "start: x"}, "structured_outputs.grammar", "unknown name"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar", "GBNF"),
        ({"grammar": ""}, "structured_outputs.grammar", "Empty grammar"),
        ({"grammar": "root ::= a"}, "structured_outputs.grammar", "GBNF: Rule 'a' not found"),
        ({"json": "{"}, "structured_outputs.json", "this is not JSON"),
        ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "NaN"),
        ({"json": '{"minimum": 1e999}'}, "structured_outputs.json", "too large"),
        ({"json": "[]"}, "structured_outputs.json", "a schema is an object"),
        ({"json": {"const": b"x"}}, "structured_outputs.json", "this is not JSON"),
    ],
)
def test_refusals(params: dict[str, object], param: str, says: str) -> None:
    asked = StructuredOutputsParams(**params)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=says) as refused:
        grammar_of(asked)
    assert refused.value.param == param
