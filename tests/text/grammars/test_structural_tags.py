"""Both spellings of structural tags: what they let through, and what is refused by name."""

import json
from typing import Any

import pytest
from tests.text.grammars.walks import accepts

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
F, G = (
    {"type": "tag", "begin": f"<{name}>", "content": NUMBER, "end": f"</{name}>"} for name in "fg"
)
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ","}

FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "a"}, ["a"], ["", "aa"]),
    ({"type": "regex", "pattern": "[ab]+"}, ["ab"], ["c"]),
    ({"type": "regex", "pattern": "[ab]+", "excludes": ["ab"]}, ["ba"], ["bab"]),
    (ANY, ["", "anything < \n"], []),
    ({**ANY, "excludes": ["no"]}, ["n o"], ["a no b"]),
    (F, ["<f>1</f>"], ["<f>1", "1", "<f>x</f>", "<f>1</f> "]),
    ({**F, "end": ["!", "?"]}, ["<f>1!", "<f>1?"], ["<f>1"]),
    ({**F, "content": ANY}, ["<f>x\n</f>", "<f></f>"], ["<f>x", "<f></f></f>"]),
    ({**F, "content": ANY, "end": ""}, ["<f>x"], ["x"]),
    ({"type": "or", "elements": [F, G]}, ["<f>1</f>", "<g>1</g>"], ["<h>1</h>"]),
    ({"type": "sequence", "elements": [F, G, ANY]}, ["<f>1</f><g>2</g>x"], ["<g>2</g>"]),
    ({"type": "optional", "content": F}, ["", "<f>1</f>"], ["<f>1</f><f>1</f>"]),
    ({"type": "star", "content": F}, ["", "<f>1</f><f>1</f>"], ["x"]),
    ({"type": "plus", "content": F}, ["<f>1</f><f>1</f>"], [""]),
    ({"type": "repeat", "content": F, "min": 1, "max": 1}, ["<f>1</f>"], ["", "<f>1</f><f>1</f>"]),
    (TRIGGERED, ["", "no tags", "x<f>1</f>y<g>2</g>z"], ["a<b", "<f>", "<h>1</h>"]),
    ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>y<g>2</g>z"], ["", "x<f>1</f>"]),
    ({**TRIGGERED, "stop_after_first": True}, ["x", "x<f>1</f>"], ["<f>1</f>y"]),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f>1</f>"],
        ["x", "<f>1</f>y"],
    ),
    (SEPARATED, ["", "<f>1</f>", "<f>1</f>,<g>2</g>"], ["<f>1</f><g>2</g>", ","]),
    ({**SEPARATED, "at_least_one": True}, ["<f>1</f>"], [""]),
    ({**SEPARATED, "stop_after_first": True}, ["<f>1</f>"], ["<f>1</f>,<g>2</g>"]),
]


@pytest.mark.parametrize(("value", "good", "bad"), FORMATS)
def test_formats(
    compiler: GrammarCompiler, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": value}
    for params in (
        StructuredOutputsParams(structural_tag=tag),
        StructuredOutputsParams(structural_tag=json.dumps(tag)),
    ):
        for text in good:
            assert accepts(compiler, params, text), text
        for text in bad:
            assert not accepts(compiler, params, text), text


def test_older_spelling(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<function=f>", "schema": schema, "end": "</function>"}],
        "triggers": ["<function="],
    }
    params = StructuredOutputsParams(structural_tag=tag)
    assert accepts(compiler, params, 'so: <function=f>{"a": 1}</function> and')
    assert accepts(compiler, params, "<functio")
    assert not accepts(compiler, params, "<function=f>{}</function>")
    assert not accepts(compiler, params, "<function=g>")


def test_special_token(compiler: GrammarCompiler) -> None:
    token_id = compiler.tokenizer._backend.token_to_id("<|im_start|>")
    for token in ("<|im_start|>", token_id):
        value = {"type": "token", "token": token}
        grammar = grammar_of(StructuredOutputsParams(structural_tag={"format": value}))
        state = compiler.compile(grammar).start()
        state.consume([token_id])
        assert state.is_finished


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({}, '"format", or "structures"'),
        ({"format": {"type": "grammar"}}, "#/format: type 'grammar' is not supported"),
        ({"format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"format": {**NUMBER, "style": "xml"}}, "style"),
        ({"format": {**F, "extra": 1}}, "extra is not supported"),
        ({"format": {"type": "sequence", "elements": [ANY, F]}}, "#/format/elements/0: any_text"),
        ({"format": {"type": "sequence", "elements": [TRIGGERED, F]}}, "free text"),
        ({"format": {**TRIGGERED, "triggers": ["<h"]}}, "exactly one of the triggers"),
        ({"format": {**F, "content": {**NUMBER, "json_schema": {"if": {}}}}}, "#: if is not"),
        ({"format": {"type": "repeat", "content": F, "min": 1, "max": 10**9}}, "min and max"),
        ({"format": {"type": "token", "token": "x"}}, "special token"),
        ({"structures": [], "triggers": ["<"]}, "structures"),
    ],
)
def test_refusals(tag: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refused:
        grammar_of(StructuredOutputsParams(structural_tag=tag))
    assert refused.value.param == "structured_outputs.structural_tag"
