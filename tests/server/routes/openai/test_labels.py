"""Fields inside of a body's objects: labels are left out by name, what says something is not."""

from dataclasses import replace

import pytest
from tests.server.routes.openai.test_chat_tools import WEATHER, post, say, service

__all__ = ["service"]  # a fixture

HELLO = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "hello", "annotations": [1]}
CHAT = {"messages": [HELLO], "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
NAMED = {"name": "n", "schema": SCHEMA}

LABELS = {
    "messages.id": CHAT | {"messages": [HELLO | {"id": 7}]},
    "messages.thinking_blocks": CHAT | {"messages": [HELLO | {"thinking_blocks": [{"a": 1}]}]},
    "messages.content.annotations": CHAT
    | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "annotations": [1]}]}
        ]
    },
    "tools.annotations": CHAT | {"tools": [WEATHER | {"annotations": {"title": "w"}}]},
    "tools.function.outputSchema": CHAT
    | {"tools": [WEATHER | {"function": WEATHER["function"] | {"outputSchema": SCHEMA}}]},
    "response_format.json_schema.title": CHAT
    | {"response_format": {"type": "json_schema", "json_schema": NAMED | {"title": "t"}}},
    "stream_options.chunk_size": CHAT
    | {"stream": True, "stream_options": {"include_usage": True, "chunk_size": 1}},
    "reasoning.summary": CHAT | {"reasoning": {"effort": "low", "summary": "auto"}},
}


@pytest.mark.parametrize("name", LABELS)
def test_a_label_changes_nothing_and_is_named(service, name):
    say(service, "hi")
    answer = post(service, LABELS[name])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == name
    assert "x-ignored-fields" not in post(service, CHAT).headers


@pytest.mark.parametrize("name", LABELS)
def test_the_operator_may_have_labels_refused(service, name):
    answer = post(replace(service, unknown_fields="refuse"), LABELS[name])
    assert answer.status_code == 400
    assert name.startswith(answer.json()["error"]["param"])


def test_a_label_is_named_once_however_often_it_stands_there(service):
    say(service, "hi")
    messages = [HELLO | {"id": at + 1, "opts": {"visible": False}} for at in range(50)]
    answer = post(service, CHAT | {"messages": messages})
    assert answer.headers["x-ignored-fields"] == "messages.id, messages.opts"


def test_completions_and_tokenize_leave_labels_out_too(service):
    say(service, "hi")
    stream = {"stream": True, "stream_options": {"chunk_size": 1}}
    chat = {"messages": [HELLO | {"id": 1}], "tools": [WEATHER | {"id": 2}]}
    for path, body, named in (
        ("/v1/completions", {"prompt": "a"} | stream, "stream_options.chunk_size"),
        ("/tokenize", chat, "tools.id, messages.id"),
        ("/api/chat", chat, "tools.id, messages.id"),
    ):
        answer = post(service, body, path)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == named


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [HELLO | {"audio": {"id": "a"}}]}, "messages", "has audio, which is not"),
        ({"messages": [HELLO | {"images": ["aGk="]}]}, "messages", "has images, which is not"),
        ({"messages": [HELLO | {"prefix": True}]}, "messages", "continue_final_message"),
        (
            {"tools": [{"function": {"name": "f", "inputSchema": SCHEMA}}]},
            "tools",
            "'inputSchema', but the JSON schema of its arguments must be in parameters",
        ),
        (
            {"tools": [{"function": {"name": "f", "paramters": SCHEMA}}]},
            "tools",
            "'paramters', but the JSON schema",
        ),
        ({"messages": [HELLO | {"imageUrls": ["a"]}]}, "messages", "the model reads only text"),
        ({"messages": [HELLO | {"toolInvocations": [{}]}]}, "messages", "send calls as tool_calls"),
        ({"messages": [HELLO | {"tool_results": [{}]}]}, "messages", "with the role tool"),
        (
            {"messages": [{"role": "tool", "content": "a", "toolCallId": "b"}]},
            "messages",
            "did you mean tool_call_id?",
        ),
        (
            {"tools": [{"function": {"name": "f"}, "parameters": SCHEMA}]},
            "tools",
            "'parameters' beside its function",
        ),
        (
            {"tools": [{"function": {"name": "f", "parametersJsonSchema": SCHEMA}}]},
            "tools",
            "must be in parameters",
        ),
        (
            {"tools": [{"function": {"name": "f"}, "inputSchema": SCHEMA}]},
            "tools",
            "must be in parameters",
        ),
        (
            {"response_format": {"type": "json_object", "schemaa": SCHEMA}},
            "response_format",
            "did you mean schema?",
        ),
        (
            {"response_format": {"type": "json_object", "properties": {}}},
            "response_format",
            "'properties', which is not a form",
        ),
        (
            {"response_format": {"type": "regex", "value": "a", "schema": SCHEMA}},
            "response_format",
            "both a value and schema",
        ),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options", "boolean"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"weather": 1}, "weather", "unknown field 'weather'; leave it out"),
    ],
)
def test_labels_that_would_change_the_answer_are_refused(service, fields, param, words):
    answer = post(service, CHAT | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"] and error["param"].startswith(param)
