"""Schemas that zod, pydantic and others write: they allow what the library does.

`library_schemas` has them, with values that the library accepts and others that it refuses, and the
programs that wrote them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.grammars.walks import byte_tokens

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of

FOLDER = Path(__file__).parent / "library_schemas"
FILES = ("zod", "pydantic", "others")
CASES = {
    f"{file}: {name}": case
    for file in FILES
    for name, case in json.loads((FOLDER / f"{file}.json").read_text()).items()
}


def obeys(compiler: GrammarCompiler, grammar: str, value: Any) -> bool:
    """Whether `value`, as Python writes it, is an answer of the grammar."""
    state = compiler.compile(grammar).start()
    try:
        for token_id in byte_tokens(compiler, json.dumps(value, ensure_ascii=False)):
            state.consume([token_id])
    except ValueError:
        return False
    return state.can_end


@pytest.mark.parametrize("name", CASES)
def test_schema_allows_what_its_library_does(compiler: GrammarCompiler, name: str) -> None:
    case = CASES[name]
    params = StructuredOutputsParams(json=case["schema"])
    if case.get("is_refused"):
        with pytest.raises(InvalidRequestError, match="uniqueItems is not supported"):
            grammar_of(params)
        return
    grammar = grammar_of(params)
    compiler.compile(grammar)
    for value in case["good"]:
        assert obeys(compiler, grammar, value), value
    for value in case["bad"]:
        assert not obeys(compiler, grammar, value), value
