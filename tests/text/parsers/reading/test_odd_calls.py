"""What becomes of calls that are written oddly: repaired, taken as they are, or text."""

import json

import pytest
from tests.text.parsers.dialect_samples import TOOLS, USE, events_of, parts_of

from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse


def read(name: str, text: str, prompt_end: str = "") -> list[MessageEvent]:
    """Read in one piece and by characters, which is the same."""
    dialect = find_dialect(None, name)
    events = events_of(dialect, [text], prompt_end=prompt_end)
    assert events_of(dialect, text, prompt_end=prompt_end) == events
    return events


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def call(arguments: str, name: str = "find", call_id: str | None = None) -> list[MessageEvent]:
    return [CallStart(0, name, call_id), CallArguments(0, arguments), CallEnd(0)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"text": "x"}, "name": "find"}', '{"text": "x"}'),
        ('{"name": "find", "parameters": {"text": "x"}}', '{"text": "x"}'),
        ('{"name": "find"}', "{}"),
        ('{"name": "find", "arguments": null}', "{}"),
        ('{"name": "find", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"type": "function", "name": "find", "arguments": {}}', "{}"),
        ('{"name": "find", "arguments": {"text": "a\nb\tc"}}', '{"text": "a\\nb\\tc"}'),
        ('{"name": "find", "arguments": {"text": "\\ud83d\\ude00"}}', '{"text": "\\ud83d\\ude00"}'),
        ('{"name": "find", "arguments": {"text": "</tool_call>"}}', '{"text": "</tool_call>"}'),
        ('{"name": "find", "arguments": {}', "{}"),
    ],
)
def test_a_call_in_json(written: str, arguments: str) -> None:
    assert read("hermes", hermes(written)) == call(arguments)


def test_a_call_of_an_unknown_tool_is_passed_on() -> None:
    assert read("hermes", hermes('{"name": "other", "arguments": {}}')) == call("{}", "other")


def test_without_a_mark_only_known_tools_are_called() -> None:
    text = '{"name": "other", "parameters": {}}'
    assert read("llama3", text) == [text]
    assert read("llama3", text.replace("other", "find")) == call("{}")


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before it.",
        hermes('{"name": 1, "arguments": {}}'),
        hermes('{"name": "find", "arguments": [1]}'),
        hermes('{"name": "", "arguments": {}}'),
        hermes("find()"),
        "\n\nno call\n",
    ],
)
def test_text_that_is_no_call_stays_text(text: str) -> None:
    assert read("hermes", text) == [text]


def test_arguments_that_break_off_are_a_call_without_an_end() -> None:
    events = read("hermes", hermes('{"name": "find", "arguments": {"limit": 12x}}') + " So.")
    assert events == [
        CallStart(0, "find"),
        CallArguments(0, '{"limit": '),
        "12x}}\n</tool_call> So.",
    ]


def test_text_around_calls() -> None:
    one = hermes('{"name": "stop", "arguments": {}}')
    events = read("hermes", f"One.\n\n{one}\nTwo.\n{one}\n{one}\nThree.\n")
    assert parts_of(events, str) == ["One.", "Two.", "Three.\n"]
    assert [event.index for event in events if isinstance(event, CallStart)] == [0, 1, 2]


def test_a_mark_that_is_cut_behind_a_call_is_no_text() -> None:
    assert read("hermes", hermes('{"name": "find", "arguments": {}}')[:-3]) == call("{}")


def test_ids_that_the_model_writes() -> None:
    events = read("mistral", '[TOOL_CALLS]find[CALL_ID]abc123XYZ[ARGS]{"text": "x"}')
    assert events == call('{"text": "x"}', call_id="abc123XYZ")


@pytest.mark.parametrize(
    ("prompt_end", "text", "reasoning", "answer"),
    [
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nYes", ["hm"], ["Yes"]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes", [], ["Yes"]),
        ("<|im_start|>assistant\n", "<think>hm</think>Yes", ["hm"], ["Yes"]),
        ("<|im_start|>assistant\n", "Yes <think>", [], ["Yes <think>"]),
        ("<think>", "cut off", ["cut off"], []),
    ],
)
def test_reasoning_begins_where_the_prompt_says(
    prompt_end: str, text: str, reasoning: list[str], answer: list[str]
) -> None:
    events = read("hermes", text, prompt_end)
    assert parts_of(events, ReasoningPiece) == reasoning
    assert parts_of(events, str) == answer


def test_harmony_goes_on_where_the_prompt_ended() -> None:
    events = read("harmony", "hm<|end|>", "<|start|>assistant<|channel|>analysis<|message|>")
    assert events == [ReasoningPiece("hm")]


TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "named": {"$ref": "#/$defs/Named"},
    "kind": {"enum": ["1", "2"]},
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", "", ""),
        ("count", "5", 5),
        ("count", "many", "many"),
        ("share", "1e3", 1000.0),
        ("flag", "True", True),
        ("list", "[1, {}]", [1, {}]),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "5.5", "5.5"),
        ("named", "7", 7),
        ("kind", "1", "1"),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("unknown", "plain", "plain"),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(
    key: str, written: str, value: object
) -> None:
    schema = {"type": "object", "properties": TYPES, "$defs": {"Named": {"type": "integer"}}}
    tool_use = ToolUse((Tool("find", None, schema),), ToolMode.AUTO)
    text = (
        f"<tool_call>find\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    )
    events = events_of(find_dialect(None, "glm"), text, tool_use=tool_use)
    assert json.loads("".join(parts_of(events, CallArguments))) == {key: value}


def test_line_breaks_around_a_value_are_no_part_of_it() -> None:
    text = "<function=find><parameter=text>\n\na\n\n</parameter></function>"
    assert read("qwen3_coder", text) == call('{"text": "\\na\\n"}')


def test_python_literals() -> None:
    text = "[find(text=\"it's\", limit=-2, folders=[None, True, {'a': (1.5,)}])]"
    assert read("pythonic", text) == call(
        '{"text": "it\'s", "limit": -2, "folders": [null, true, {"a": [1.5]}]}'
    )


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "llama3", "pythonic", "gemma4", "harmony"]
)
@pytest.mark.parametrize("unit", ["<", " ", "\n", "{", "[", '"', "\\", "a", "<tool_call>", "find("])
def test_nothing_that_repeats_is_lost(name: str, unit: str) -> None:
    """Pieces that begin marks again and again are each looked at a bounded number of times."""
    text = f"x{unit * 3_000}y"
    events = read(name, text)
    assert parts_of(events, str) == [text]
    assert USE.tools == TOOLS


@pytest.mark.parametrize(
    ("value", "read_as"),
    [
        ('["a</parameter>", "b\\"</parameter>"]', '["a</parameter>", "b\\"</parameter>"]'),
        ('["a", b]', '"[\\"a\\", b]"'),  # no JSON: up to the first mark, as text
        ('["a', '"[\\"a"'),
        ('["a"] x', '"[\\"a\\"] x"'),
        ("['a']", "\"['a']\""),
    ],
)
def test_a_mark_in_a_string_of_json_ends_no_argument(value: str, read_as: str) -> None:
    parameter = f"<parameter=folders>\n{value}\n</parameter>\n"
    text = f"<tool_call>\n<function=find>\n{parameter}</function>\n</tool_call>"
    assert read("qwen3_coder", text) == call(f'{{"folders": {read_as}}}')
