"""What grammars write of calls equals what a model's template writes of them in the next turn."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.text.parsers.dialect_samples import events_of
from tests.text.parsers.grammars.random_walk import (
    END,
    phrases_of,
    tokenizer_with_marks,
    walk,
)

from quire.text.chat_template import ChatTemplate
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.message_events import CallArguments, CallEnd, CallStart
from quire.text.parsers.template_fit import fitted
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

TEMPLATES: dict[str, str] = tomllib.loads(
    (Path(__file__).parent / "call_templates.toml").read_text(encoding="utf-8")
)
SAVE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["novel", "poem"]},
        "pages": {"type": "integer"},
        "done": {"type": "boolean"},
        "authors": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["text", "kind", "pages", "done", "authors"],
    "additionalProperties": False,
}
TOOLS = (Tool("save", "Saves.", SAVE), Tool("list_all"))
all_templates = pytest.mark.parametrize("name", sorted(TEMPLATES))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = tokenizer_with_marks()
    end = tokenizer.encode(END, add_special_tokens=False)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, end)


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, {})


def fitted_dialect(name: str) -> Dialect:
    """Without reasoning, which random walks would begin with."""
    dialect = fitted(find_dialect(None, name.partition(",")[0]), template_of(name).render)
    return msgspec.structs.replace(dialect, reasoning=None)


def history_of(dialect: Dialect, text: str, tool_use: ToolUse) -> list[dict[str, Any]]:
    """The message with the calls that `text` means, as a client sends it back."""
    calls: list[dict[str, Any]] = []
    for event in events_of(dialect, [text], tool_use=tool_use):
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": "123456789", "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            calls[-1]["function"]["arguments"] += event.text
        else:
            assert isinstance(event, CallEnd), event
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return [{"role": "user", "content": "a"}, message]


@all_templates
def test_generated_calls_are_rendered_as_they_were_written(
    compiler: GrammarCompiler, name: str
) -> None:
    dialect, template = fitted_dialect(name), template_of(name)
    use = ToolUse(TOOLS, ToolMode.REQUIRED, is_parallel=name != "llama3")
    grammar = dialect.grammar(use, tokenizer=compiler.tokenizer)
    assert grammar is not None
    num_ended = 0
    for seed in range(12):
        text, has_ended = walk(compiler, grammar, phrases_of(dialect), seed)
        if has_ended and not {r"\u", "-0"} & {text[at : at + 2] for at in range(len(text))}:
            num_ended += 1
            history = history_of(dialect, text, use)
            rendered = template.render(history, add_generation_prompt=False)
            assert text in rendered.replace(', "id": "123456789"', "")
    assert num_ended >= 3


@all_templates
def test_fitting_changes_only_how_calls_are_written(name: str) -> None:
    plain = find_dialect(None, name.partition(",")[0])
    found = fitted(plain, template_of(name).render)
    assert "," in name or name in ("qwen3_coder", "gemma4") or found == plain
    assert found.calls[1:] == plain.calls[1:]
    for old, new in zip(plain.calls, found.calls, strict=True):
        assert new.marker == old.marker and new.end.split() == old.end.split()


def test_white_space_and_keys_are_the_templates() -> None:
    (form,) = fitted_dialect("hermes, compact and sorted").calls
    assert (form.begin, form.end, form.separator) == ("<tool_call>", "</tool_call>", "\n")
    assert (form.item_separator, form.key_separator, form.sorts_keys) == (",", ":", True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tool_calls }}",
        "{% for m in messages %}{{ m.tool_calls | tojson(indent=2) }}{% endfor %}",
    ],
)
def test_a_template_that_writes_no_such_calls_changes_nothing(source: str) -> None:
    for name in ("hermes", "glm", "pythonic", "harmony"):
        dialect = find_dialect(None, name)
        assert fitted(dialect, ChatTemplate({"default": source}, {}).render) == dialect


def test_sorting_reaches_into_objects() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    tool = Tool("f", None, {"type": "object", "properties": {"z": inner, "C": {"enum": ["c"]}}})
    grammar = fitted_dialect("hermes, compact and sorted").grammar(
        ToolUse((tool,), ToolMode.REQUIRED)
    )
    assert grammar is not None
    assert grammar.index('"C"') < grammar.index('"z"') < grammar.index('"a"') < grammar.index('"b"')
