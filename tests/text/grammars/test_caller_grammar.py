"""Grammars in Lark and GBNF as callers write them."""

import pytest
from tests.text.grammars.walks import accepts

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of


def test_schemas_in_a_grammar_are_rewritten_like_all_others(compiler: GrammarCompiler) -> None:
    grammar = 'start: "<" %json {"title": "x", "items": [{"type": "integer"}]} ">" // %json {'
    params = StructuredOutputsParams(grammar=grammar)
    assert accepts(compiler, params, "<[1]>")
    assert not accepts(compiler, params, '<["a"]>')


def test_words_in_texts_and_comments_mean_nothing(compiler: GrammarCompiler) -> None:
    grammar = 'start: "%json {" /[%a]json[(|:]/ // %json [temperature=1]\n# %directive\n'
    assert accepts(compiler, StructuredOutputsParams(grammar=grammar), "%json {ajson(")


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: item ("+" item)*\n?item: NUMBER\nNUMBER: /[0-9]{1,3}/',
        'root ::= item ("+" item)*\nitem ::= [0-9] | [0-9] [0-9]',
        'sum ::= num ("+" num)*\nroot ::= sum\nnum ::= [0-9]+',
    ],
)
def test_lark_and_gbnf_are_told_apart(compiler: GrammarCompiler, grammar: str) -> None:
    params = StructuredOutputsParams(grammar=grammar)
    assert accepts(compiler, params, "1+23") and not accepts(compiler, params, "+")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ('start: %json {"not": {"items": {}}}', "not is not supported"),
        ("start: %json {", "%json"),
        ("start: a\na[temperature=0.5]: /a/", "temperature of a rule is not"),
        ('start: a "b"\na[stop="b"]: /.*/', "stop of a rule is not"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance with options"),
        ('root: "a"', "start"),
        ('%declare A\nstart: "a"', "%declare is not supported"),
    ],
)
def test_refusals(grammar: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        grammar_of(StructuredOutputsParams(grammar=grammar))
