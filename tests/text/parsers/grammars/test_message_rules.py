"""What a dialect's grammar allows, its parser reads: random walks for every dialect."""

import json
from dataclasses import replace

import jsonschema
import pytest
from tests.text.parsers.dialect_samples import events_of, parts_of
from tests.text.parsers.grammars.random_walk import (
    END,
    phrases_of,
    tokenizer_with_marks,
    tokenizer_without_marks,
    walk,
)

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import DIALECTS, find_dialect
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.parsers.tool_use import NO_TOOLS, Tool, ToolMode, ToolUse

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["novel", "poem"]},
        "pages": {"type": "integer"},
        "read": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "authors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "born": {"type": "number"}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "maxItems": 2,
        },
    },
    "required": ["title", "kind", "authors"],
    "additionalProperties": False,
}
TOOLS = (Tool("add_book", "Adds a book.", BOOK), Tool("list-books"), Tool("add", None, BOOK))
SCHEMAS = {"add_book": BOOK, "add": BOOK, "list-books": {"type": "object", "maxProperties": 0}}
PYTHON_TOOLS = tuple(Tool(tool.name.replace("-", "_"), None, tool.parameters) for tool in TOOLS)
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
all_dialects = pytest.mark.parametrize("name", sorted(DIALECTS))


@pytest.fixture(scope="module", params=[tokenizer_with_marks, tokenizer_without_marks])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    tokenizer = request.param()
    end = tokenizer.encode(END, add_special_tokens=False)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, end)


def tools_for(dialect: Dialect) -> tuple[Tool, ...]:
    is_python = any(type(form).__name__ == "PythonForm" for form in dialect.calls)
    return PYTHON_TOOLS if is_python else TOOLS


def check_calls(events: list[MessageEvent]) -> int:
    """Each whole call obeys its tool's schema; returns their number."""
    name, arguments, num_whole = "", "", 0
    for event in events:
        if isinstance(event, CallStart):
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            arguments += event.text
        elif isinstance(event, CallEnd):
            jsonschema.validate(json.loads(arguments), SCHEMAS[name.replace("list_", "list-")])
            num_whole += 1
    return num_whole


def walked(
    compiler: GrammarCompiler,
    dialect: Dialect,
    tool_use: ToolUse,
    seed: int,
    *,
    answer_format: StructuredOutputsParams | None = None,
    budget: int | None = None,
    prompt_end: str = "",
) -> tuple[list[MessageEvent], bool]:
    """The events of a random message, and whether it came to its end.

    It is read as one that may have text, so that a forced call that was read as text is seen; a
    message that came to its end is read equally as what it is.
    """
    grammar = dialect.grammar(tool_use, answer_format, budget, prompt_end, compiler.tokenizer)
    assert grammar is not None
    text, is_whole = walk(compiler, grammar, phrases_of(dialect), seed)
    mode = ToolMode.AUTO if tool_use.mode is ToolMode.REQUIRED else tool_use.mode
    read, read_as_it_is = (
        events_of(
            dialect,
            [text],
            tool_use=use,
            prompt_end=prompt_end,
            has_answer_format=answer_format is not None,
        )
        for use in (replace(tool_use, mode=mode), tool_use)
    )
    assert read == read_as_it_is or not is_whole
    return read, is_whole


def is_refused(dialect: Dialect, compiler: GrammarCompiler) -> bool:
    """Whether the marks have to be tokens and are none; then the sentence that says so is there."""
    channels, known = dialect.channels, compiler.tokenizer.added_tokens
    if channels is None or channels.channel in known:
        return False
    with pytest.raises(InvalidRequestError, match="no special token"):
        dialect.grammar(ToolUse(TOOLS, ToolMode.REQUIRED), None, None, "", compiler.tokenizer)
    return True


@all_dialects
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_calls(compiler: GrammarCompiler, name: str, is_parallel: bool) -> None:
    dialect = find_dialect(None, name)
    if is_refused(dialect, compiler):
        return
    tool_use = ToolUse(tools_for(dialect), ToolMode.REQUIRED, is_parallel=is_parallel)
    num_ended = 0
    for seed in range(3):
        events, has_ended = walked(compiler, dialect, tool_use, seed)
        num_calls = check_calls(events)
        assert not parts_of(events, str)
        if has_ended:
            num_ended += 1
            assert num_calls == sum(isinstance(event, CallStart) for event in events) >= 1
            assert is_parallel or num_calls == 1
    assert num_ended >= 1


@all_dialects
def test_text_with_calls(compiler: GrammarCompiler, name: str) -> None:
    """Free text; once a call begins, it obeys its tool. Strict tools make it so everywhere."""
    dialect = find_dialect(None, name)
    if is_refused(dialect, compiler):
        return
    tools = tuple(replace(tool, is_strict=True) for tool in tools_for(dialect))
    num_ended = 0
    for seed in range(3):
        events, has_ended = walked(compiler, dialect, ToolUse(tools, ToolMode.AUTO), seed)
        num_calls = check_calls(events)
        if has_ended:
            num_ended += 1
            assert num_calls == sum(isinstance(event, CallStart) for event in events)
    assert num_ended >= 1


@all_dialects
def test_an_answer_of_a_form_or_calls(compiler: GrammarCompiler, name: str) -> None:
    dialect = find_dialect(None, name)
    if is_refused(dialect, compiler):
        return
    answer = StructuredOutputsParams(json=ANSWER)
    tool_use = ToolUse(tools_for(dialect), ToolMode.AUTO)
    num_ended = 0
    for seed in range(3):
        for use in (tool_use, NO_TOOLS):
            events, has_ended = walked(compiler, dialect, use, seed, answer_format=answer)
            num_calls = check_calls(events)
            if has_ended:
                num_ended += 1
                (text,) = parts_of(events, str) or [""]
                assert bool(text) != bool(num_calls)
                if text:
                    jsonschema.validate(json.loads(text), ANSWER)
    assert num_ended >= 1


@pytest.mark.parametrize(
    ("name", "prompt_end"),
    [
        ("hermes", "<|im_start|>assistant\n<think>\n"),
        ("mistral", "[THINK]"),
        ("harmony", "<|start|>assistant"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>"),
    ],
)
def test_a_budget_ends_reasoning(name: str, prompt_end: str) -> None:
    tokenizer = tokenizer_with_marks()
    end = tokenizer.encode(END, add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, end)
    dialect = find_dialect(None, name)
    answer = StructuredOutputsParams(json=ANSWER)
    has_reasoned = False
    for seed in range(6):
        events, has_ended = walked(
            compiler, dialect, NO_TOOLS, seed, answer_format=answer, budget=5, prompt_end=prompt_end
        )
        thoughts = "".join(parts_of(events, ReasoningPiece))
        assert len(thoughts) <= 5 * tokenizer.longest_token_bytes
        has_reasoned = has_reasoned or bool(thoughts)
        assert has_ended
        jsonschema.validate(json.loads("".join(parts_of(events, str))), ANSWER)
    assert has_reasoned


def test_a_budget_needs_a_mark_that_is_a_token() -> None:
    dialect = find_dialect(None, "hermes")
    with pytest.raises(InvalidRequestError, match="not a single token"):
        dialect.grammar(NO_TOOLS, None, 5, "<think>", tokenizer_without_marks())


@all_dialects
def test_nothing_wanted_is_no_grammar(name: str) -> None:
    assert find_dialect(None, name).grammar(NO_TOOLS) is None


def test_schemas_of_strict_tools_are_obeyed_or_refused() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a+$"}}}
    loose, strict = (
        ToolUse((Tool("f", None, schema, is_strict),), ToolMode.REQUIRED)
        for is_strict in (False, True)
    )
    dialect = find_dialect(None, "qwen3_coder")
    assert dialect.grammar(loose)
    with pytest.raises(InvalidRequestError, match=r"pattern is not supported.* without strict"):
        dialect.grammar(strict)
    assert find_dialect(None, "hermes").grammar(strict)


def test_a_named_tool_is_called_once() -> None:
    tool_use = ToolUse(TOOLS, ToolMode.REQUIRED, frozenset({"add"}))
    grammar = find_dialect(None, "json").grammar(tool_use)
    assert grammar is not None
    assert "add_book" not in grammar and ")*" not in grammar.splitlines()[1]


def test_a_prompt_that_ended_the_reasoning_has_no_more() -> None:
    dialect = find_dialect(None, "hermes")
    tokenizer = tokenizer_with_marks()
    answer = StructuredOutputsParams(json=ANSWER)
    mark = f"<[{tokenizer.added_tokens['<think>']}]>"
    for prompt_end, is_allowed in (("", True), ("<think>\n\n</think>\n\n", False)):
        grammar = dialect.grammar(NO_TOOLS, answer, None, prompt_end, tokenizer)
        assert grammar is not None
        assert (mark in grammar) == is_allowed
