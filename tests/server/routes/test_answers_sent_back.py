"""Whatever the server answers can be sent back: whole and streamed, in each API, cut anywhere."""

import json

import pytest
from pydantic_core import from_json
from tests.server.responding import read_events
from tests.server.routes.openai.test_chat_tools import (
    CALLS,
    WEATHER,
    chunks,
    merged,
    post,
    say,
    service,
)

from quire.core.request import FinishReason

__all__ = ["service"]  # a fixture

HELLO = {"role": "user", "content": "hello"}
FUNCTION = WEATHER["function"]
CHAT = {"messages": [HELLO], "tools": [WEATHER, {"function": {"name": "get_time"}}]}
MESSAGES = {
    "messages": [HELLO],
    "max_tokens": 200,
    "tools": [
        {"name": "get_weather", "input_schema": FUNCTION["parameters"]},
        {"name": "get_time", "input_schema": {"type": "object"}},
    ],
    "thinking": {"type": "adaptive"},
}
RESPONSES = {
    "input": [HELLO],
    "tools": [{"type": "function", **FUNCTION}, {"type": "function", "name": "get_time"}],
}
THOUGHT_ONLY = "<think>\nHm, what"
TEXTS = {"calls": CALLS, "thought": THOUGHT_ONLY, "text": "I look.", "nothing": ""}


def cut_texts(service):
    """All of each text, and beginnings of it."""
    for text in TEXTS.values():
        yield text, FinishReason.STOP
        tokens = service.tokenizer.encode(text, add_special_tokens=False)
        for count in range(0, len(tokens), 31):
            yield service.tokenizer.decode(tokens[:count]), FinishReason.LENGTH


def accepted(service, body, path):
    say(service, "ok")
    answer = post(service, body, path)
    assert answer.status_code == 200, (answer.text, body)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": None}, {"include_reasoning": False}])
def test_messages_of_a_chat(service, streamed, more):
    wish = CHAT | more
    for text, reason in cut_texts(service):
        say(service, text, reason)
        if streamed:
            message, _ = merged(chunks(service, wish))
        else:
            message = post(service, wish).json()["choices"][0]["message"]
        assert message["content"] is not None or message["tool_calls"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": None}
            for call in message.get("tool_calls", ())
        ]
        without_nulls = {name: value for name, value in message.items() if value is not None}
        said = [HELLO, message, *results, HELLO, without_nulls, *results, HELLO]
        accepted(service, wish | {"messages": said}, "/v1/chat/completions")


def message_of(text):
    """The message that a client puts together from events."""
    content, pieces = [], []
    for line in text.split("\n"):
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            content.append(event["content_block"])
            pieces.append("")
        for name, piece in event.get("delta", {}).items():
            if name == "partial_json":
                pieces[-1] += piece
            elif name in ("text", "thinking", "signature"):
                content[-1][name] += piece
    for block, piece in zip(content, pieces, strict=True):
        if block["type"] == "tool_use":
            block["input"] = from_json(piece or "{}", allow_partial=True)
    return {"content": content}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_messages_of_anthropics_api(service, streamed, display):
    wish = MESSAGES | {"thinking": {"type": "adaptive", "display": display}}
    for text, reason in cut_texts(service):
        say(service, text, reason)
        answer = post(service, wish | {"stream": streamed}, "/v1/messages")
        assert answer.status_code == 200, answer.text
        message = message_of(answer.text) if streamed else answer.json()
        content = message["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": None}
            for block in content
            if block["type"] == "tool_use"
        ]
        said = {"role": "assistant", "content": content}
        then = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
        accepted(service, wish | {"messages": [HELLO, said, then]}, "/v1/messages")


@pytest.mark.parametrize("streamed", [False, True])
def test_items_of_a_response(service, streamed):
    for text, reason in cut_texts(service):
        say(service, text, reason)
        answer = post(service, RESPONSES | {"stream": streamed}, "/v1/responses")
        assert answer.status_code == 200, answer.text
        response = read_events(answer.text)[-1]["response"] if streamed else answer.json()
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": None}
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        said = [HELLO, *response["output"], *results, HELLO]
        accepted(service, RESPONSES | {"input": said}, "/v1/responses")


def test_a_response_may_have_what_went_in_and_came_out_as_it_was(service):
    say(service, CALLS)
    wish = RESPONSES | {"enable_response_messages": True}
    for streamed in (False, True):
        answer = post(service, wish | {"stream": streamed}, "/v1/responses")
        response = read_events(answer.text)[-1]["response"] if streamed else answer.json()
        (given,), (written,) = response["input_messages"], response["output_messages"]
        for message in (given, written):
            assert message["type"] == "raw_message_tokens"
            text = service.tokenizer.decode(message["tokens"], skip_special_tokens=False)
            assert message["message"] == text
        assert "<|im_start|>user\nhello<|im_end|>" in given["message"]
        assert written["message"].startswith(CALLS)
    plain = post(service, RESPONSES, "/v1/responses").json()
    assert plain["input_messages"] is plain["output_messages"] is None
