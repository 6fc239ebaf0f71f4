"""Forms cross to another process as text, and what comes back makes the same grammar."""

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.grammar_forms import WholeAnswer, WholeMessage, as_text, form_of
from quire.errors import InvalidRequestError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse
from quire.text.tokenizer import Tokenizer

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"n": {"maximum": 2**60}}}, True)
JSON = StructuredOutputsParams(json={"type": "integer"}, whitespace_pattern="\\n*")


@pytest.mark.parametrize(
    "form",
    [
        WholeAnswer(JSON),
        WholeAnswer(StructuredOutputsParams(choice=["é", "\U0001f600"])),
        WholeAnswer(StructuredOutputsParams(json_object=True, disable_any_whitespace=True)),
        WholeMessage(ToolUse((TOOL, Tool("other")), ToolMode.REQUIRED, frozenset({"look"}), False)),
        WholeMessage(ToolUse((Tool("f"),), ToolMode.AUTO), JSON, None, "<think>"),
        WholeMessage(ToolUse(), JSON),
    ],
)
def test_the_same_grammar_comes_of_the_text(form) -> None:
    dialect, tokenizer = find_dialect(None, "hermes"), Tokenizer.from_folder(EMBEDDED_MODEL)

    def outcome(of) -> str | None:
        try:
            return of.grammar(dialect, tokenizer)
        except InvalidRequestError as error:
            return f"{error.param}: {error}"

    assert outcome(form_of(as_text(form))) == outcome(form)
    assert form_of(as_text(form)).origin == form.origin


def test_equal_forms_have_equal_texts_whatever_is_said_of_a_tool() -> None:
    use = ToolUse((TOOL,), ToolMode.AUTO, frozenset({"look", "a", "b"}))
    silent = Tool(TOOL.name, None, TOOL.parameters, TOOL.is_strict)
    other = ToolUse((silent,), ToolMode.AUTO, frozenset({"b", "look", "a"}))
    assert as_text(WholeMessage(use)) == as_text(WholeMessage(other))


def test_values_that_json_cannot_hold_are_refused_by_name() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    said = "^structured_outputs.json: #: objects and arrays nest deeper than"
    with pytest.raises(InvalidRequestError, match=said) as refused:
        as_text(WholeAnswer(StructuredOutputsParams(json={"const": deep})))
    assert refused.value.param == "structured_outputs.json"
    tool = Tool("f", None, {"default": deep})
    with pytest.raises(InvalidRequestError, match="tools is not valid JSON"):
        as_text(WholeMessage(ToolUse((tool,), ToolMode.AUTO)))
