"""What transformers' response templates describe is read as transformers reads it, or refused."""

import json
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.text.parsers.dialect_samples import FIND, TOOLS, events_of, parts_of
from tests.text.parsers.grammars.random_walk import END, phrases_of, walk
from tests.text.small_tokenizers import make_byte_level
from tokenizers import AddedToken
from transformers.utils.chat_parsing import ResponseParser, parse_response

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.chat_template import ChatTemplate
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.mark_patterns import UnmappableError, sequences
from quire.text.parsers.message_events import (
    CallArguments,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.parsers.model_dialect import model_dialect
from quire.text.parsers.response_template import read_response_template
from quire.text.parsers.tool_use import NO_TOOLS, ToolMode, ToolUse
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import TokenizerConfig

CASES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "response_templates.toml").read_text(encoding="utf-8")
)
OPENAI_TOOLS = [tool.as_openai() for tool in TOOLS]
all_cases = pytest.mark.parametrize("name", sorted(CASES))


def dialect_of(name: str) -> Dialect:
    return read_response_template(
        CASES[name]["template"], find_dialect(CASES[name]["chat"]), lambda text: "<" in text
    )


def message_of(events: list[MessageEvent]) -> dict[str, Any]:
    """As transformers writes messages."""
    calls: list[Any] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    message: dict[str, Any] = {
        "thoughts": "".join(parts_of(events, ReasoningPiece)),
        "content": "".join(parts_of(events, str)),
        "tool_calls": [{"name": name, "arguments": json.loads(text)} for name, text in calls],
    }
    return {key: value for key, value in message.items() if value}


def theirs(message: dict[str, Any]) -> dict[str, Any]:
    """transformers' message, with one name for reasoning."""
    found = {key: value for key, value in message.items() if key != "role"}
    for key in ("thinking", "reasoning_content"):
        if key in found:
            found["thoughts"] = found.pop(key)
    if "tool_calls" in found:
        found["tool_calls"] = [call["function"] for call in found["tool_calls"]]
    return found


def texts_of(name: str) -> list[str]:
    case = CASES[name]
    return [case[key] for key in ("message", "answer") if key in case]


@all_cases
def test_the_marks_that_we_know_are_known_again(name: str) -> None:
    found = dialect_of(name)
    assert found.name == CASES[name]["expected"]
    if found.name != "response_template":
        assert found == find_dialect(CASES[name]["chat"])


@all_cases
def test_messages_are_read_as_transformers_reads_them(name: str) -> None:
    """Whole, and cut into pieces anywhere, by both."""
    dialect, template = dialect_of(name), CASES[name]["template"]
    for text in texts_of(name):
        expected = theirs(parse_response(text, template, prefix="", tools=OPENAI_TOOLS))
        if "tool_calls" in expected:
            assert expected["tool_calls"][0] == {"name": "find", "arguments": FIND}
        visible = text.replace("</s>", "")  # an end token, which is in no text
        whole = events_of(dialect, [visible])
        assert message_of(whole) == expected
        for at in range(len(visible)):
            assert events_of(dialect, [visible[:at], visible[at:]]) == whole
        assert events_of(dialect, visible) == whole
        parser = ResponseParser(template, prefix="", tools=OPENAI_TOOLS)
        for character in text:
            parser.feed(character)
        assert theirs(parser.finalize()[0]) == expected


@all_cases
def test_a_forced_call_that_is_cut_anywhere_is_no_text(name: str) -> None:
    dialect, use = dialect_of(name), ToolUse(TOOLS, ToolMode.REQUIRED)
    text = CASES[name]["message"]
    for end in range(len(text)):
        cut = text[:end]
        events = events_of(dialect, cut, tool_use=use)
        assert events == events_of(dialect, [cut], tool_use=use)
        assert not parts_of(events, str)


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "cohere"])
def test_text_begun_by_the_prompt_is_part_of_the_message(name: str) -> None:
    template = CASES[name]["template"]
    fields = template["fields"]
    reasoning = fields.get("thinking") or fields["reasoning_content"]
    prompt = template["start_anchor"] + reasoning["open"]
    text = f"Hm.{reasoning['close']}"
    expected = theirs(parse_response(text, template, prefix=prompt))
    assert message_of(events_of(dialect_of(name), text, prompt_end=prompt)) == expected
    assert expected == {"thoughts": "Hm."}


def tokenizer_for(dialect: Dialect) -> Tokenizer:
    backend = make_byte_level()
    backend.add_special_tokens([AddedToken(mark) for mark in sorted(dialect.special_tokens)])
    return Tokenizer(backend, TokenizerConfig(named_tokens={"eos_token": AddedToken(END)}))


@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.AUTO])
@pytest.mark.parametrize(
    "name", sorted(name for name in CASES if CASES[name]["expected"] == "response_template")
)
def test_the_grammar_of_what_was_read_writes_what_is_read(name: str, mode: ToolMode) -> None:
    """And transformers reads it equally."""
    dialect = dialect_of(name)
    tokenizer = tokenizer_for(dialect)
    ends = tokenizer.encode(END, add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)
    use = ToolUse(TOOLS, mode)
    grammar = dialect.grammar(use, tokenizer=tokenizer)
    assert grammar is not None
    num_calls = 0
    for seed in range(6):
        text, has_ended = walk(compiler, grammar, phrases_of(dialect), seed)
        events = events_of(dialect, [text], tool_use=use)
        calls = message_of(events).get("tool_calls", []) if has_ended else []
        num_calls += len(calls)
        for call in calls:
            parameters = next(tool for tool in TOOLS if tool.name == call["name"]).parameters
            jsonschema.validate(call["arguments"], parameters or {})
        if has_ended and mode is ToolMode.REQUIRED:
            read = parse_response(text, CASES[name]["template"], prefix="", tools=OPENAI_TOOLS)
            assert message_of(events)["tool_calls"] == theirs(read)["tool_calls"]
    assert num_calls or mode is ToolMode.AUTO


def test_an_answer_of_a_form_stands_between_its_marks() -> None:
    dialect = dialect_of("cohere")
    tokenizer = tokenizer_for(dialect)
    ends = tokenizer.encode(END, add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    for answer_format, budget in ((wanted, None), (None, 3), (wanted, 3)):
        prompt_end = "<|START_THINKING|>"
        grammar = dialect.grammar(NO_TOOLS, answer_format, budget, prompt_end, tokenizer)
        assert grammar is not None
        text, has_ended = walk(compiler, grammar, phrases_of(dialect), 1)
        events = events_of(dialect, [text], tool_use=NO_TOOLS, prompt_end=prompt_end)
        assert "<|START_RESPONSE|>" in text and (not has_ended or "<|END_RESPONSE|>" in text)
        if answer_format is not None:
            assert parts_of(events, str) in (["yes"], ["no"])


def changed(name: str, path: str, value: Any) -> Any:
    template = deepcopy(CASES[name]["template"])
    *parents, last = path.split(".")
    place = template
    for each in parents:
        place = place[each]
    place[last] = value
    return template


@pytest.mark.parametrize(
    ("name", "path", "value", "why"),
    [
        ("smollm3", "version", 2, "its version is 2"),
        ("smollm3", "fields.mood", {"open": "<m>", "close": "</m>"}, "field 'mood'"),
        ("smollm3", "extra", 1, "unknown form"),
        ("smollm3", "fields.thinking.kind", 1, "unknown form"),
        ("smollm3", "fields.reasoning", {"open": "<r>", "close": "</r>"}, "two fields of"),
        ("smollm3", "fields.thinking", {"close": "</think>"}, "no marks around"),
        ("smollm3", "fields.thinking", {"open_pattern": "^", "close": "<"}, "not a literal mark"),
        ("smollm3", "fields.thinking.content_args", {"strip": False}, "not one plain text"),
        ("smollm3", "fields.thinking.repeats", True, "not one plain text"),
        ("smollm3", "fields.content", {"close": "done"}, "'done', which is not a special token"),
        ("smollm3", "fields.tool_calls.repeats", False, "not converted to a list"),
        ("smollm3", "fields.tool_calls.transform", {"function": "f"}, "not converted to func"),
        ("smollm3", "fields.tool_calls.transform", None, "not converted to func"),
        ("smollm3", "fields.tool_calls.content", "kv-lines", "not JSON"),
        ("smollm3", "fields.tool_calls.open", ["<a>", "<b>"], "one of several marks"),
        ("cohere", "fields.content.open", ["<a>", "<b>"], "several marks"),
        ("cohere", "fields.content.open", "<|START_ACTION|>!", "is the beginning of"),
        ("members", "fields.tool_calls.open_pattern", r"(?:<do>)?[^<]*", "not a literal mark"),
        ("members", "fields.tool_calls.open_pattern", r"<(?P<name>\w+)>", "unknown place"),
        (
            "members",
            "fields.tool_calls.transform.function.name",
            "{content.a.b}",
            "from an unknown place",
        ),
        ("tagged", "fields.tool_calls.content_args", {"tag_pattern": "<"}, "unknown pattern"),
        ("tagged", "fields.tool_calls.content_args.merge_duplicates", True, "in an unknown way"),
        (
            "tagged",
            "fields.tool_calls.open_pattern",
            r"<call>\s*<f=(?P<tool>\w+)>",
            "ends a single call",
        ),
    ],
)
def test_templates_without_an_equivalent_dialect_are_refused(
    name: str, path: str, value: Any, why: str
) -> None:
    with pytest.raises(UnmappableError, match=why):
        read_response_template(
            changed(name, path, value), find_dialect(None), lambda text: "<" in text
        )


def test_a_refused_template_is_told_and_the_chat_templates_dialect_counts() -> None:
    tokenizer = Tokenizer(make_byte_level())
    template = ChatTemplate({"default": "<tools></tools><tool_call></tool_call>"}, {})
    fields = {"response_template": CASES["smollm3"]["template"]}
    used = model_dialect(template, tokenizer, fields)
    assert (used.dialect.name, used.source, used.refusal) == (
        "hermes",
        "its response_template",
        None,
    )
    refused = model_dialect(template, tokenizer, {"response_template": {"fields": {"x": {}}}})
    assert (refused.dialect.name, refused.source) == ("hermes", "its chat template")
    assert refused.refusal is not None and "fills a message's field 'x'" in refused.refusal
    named = model_dialect(template, tokenizer, {"response_template": 7}, "llama3")
    assert (named.dialect.name, named.source, named.refusal) == (
        "llama3",
        "--tool-call-parser llama3",
        None,
    )


def test_patterns_are_read_as_far_as_they_are_marks() -> None:
    assert sequences(r"\s*<a>\s+b\n?") == [("<a>\nb",)]
    assert sequences(r"x(?:\[a\]|b)y|z") == [("x[a]y",), ("xby",), ("z",)]
    assert sequences(r"<f=(?P<name>[^>\n]+)>") == [("<f=", "name", ">")]
    for pattern in ("a*", ".", "^a", "a$", r"\w", "[ab]", "(a)", "(?=a)", "a{2}", r"\bx", "("):
        with pytest.raises(UnmappableError, match="not a literal mark"):
            sequences(pattern)
