"""Calls in a thread with a large stack: what they return, raise, and how a panic comes out."""

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars import check
from quire.text.grammars.deep_stack import GrammarEngineFaultError, on_deep_stack
from quire.text.grammars.grammar_text import grammar_of


class PanicException(BaseException):  # as the extension calls it
    pass


def panic() -> None:
    raise PanicException("called `Option::unwrap()`")


def test_results_errors_and_panics() -> None:
    assert on_deep_stack(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
    with pytest.raises(GrammarEngineFaultError, match="unwrap"):
        on_deep_stack(panic)


def test_a_grammar_on_which_the_engine_panics_is_a_mistake_of_its_writer(monkeypatch) -> None:
    def fail(function: object) -> None:
        on_deep_stack(panic)

    monkeypatch.setattr(check, "on_deep_stack", fail)
    with pytest.raises(InvalidRequestError, match="the grammar engine fails on it") as error:
        grammar_of(StructuredOutputsParams(regex="a"))
    assert error.value.param == "structured_outputs.regex"
