"""Thinking and tool calls in Messages: what a model writes becomes Anthropic's blocks."""

import json

import pytest
from anthropic.types import Message
from tests.server.in_process_grammars import InProcessGrammars
from tests.server.routes.anthropic.test_block_writer import joined, parsed
from tests.server.routes.openai.test_chat_tools import CALLS, HERMES, Speaker, post, say

from quire.core.request import FinishReason
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect_choice import find_dialect

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
BODY = {
    "messages": [{"role": "user", "content": "What's up in Łódź?"}],
    "tools": [
        {"name": "get_weather", "description": "The weather of a place.", "input_schema": SCHEMA},
        {"name": "get_time", "input_schema": {"type": "object"}},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "max_tokens": 200,
}


@pytest.fixture
def service(tokenizer):
    template = ChatTemplate({"default": HERMES}, {})
    dialect = find_dialect(None, "hermes")
    grammars = GrammarChecks(InProcessGrammars(dialect, tokenizer))
    return Service(Speaker(), tokenizer, template, "mine", dialect=dialect, grammars=grammars)


def ask(service, **fields):
    answer = post(service, BODY | fields, "/v1/messages")
    assert answer.status_code == 200, answer.text
    return answer


def without_ids(blocks):
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def test_thinking_and_calls_are_blocks(service):
    say(service, CALLS)
    message = Message.model_validate(ask(service).json())
    thinking, text, weather, time = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm, Łódź.")
    assert thinking.signature and text.text.strip() == "I look."
    assert (weather.type, weather.name, weather.input) == (
        "tool_use",
        "get_weather",
        {"place": "Łódź"},
    )
    assert (time.name, time.input) == ("get_time", {})
    assert weather.id.startswith("toolu_") and weather.id != time.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_streamed_is_whole(service, step):
    say(service, CALLS, step=step)
    whole = Message.model_validate(ask(service).json())
    start, *events, end, stop = parsed([ask(service, stream=True).content])
    assert (start.type, end.type, stop.type) == ("message_start", "message_delta", "message_stop")
    blocks = [block.model_dump(exclude={"parsed_output"}) for block in whole.content]
    assert without_ids(joined(events)) == without_ids(blocks)
    assert (end.delta.stop_reason, end.usage.output_tokens) == (
        "tool_use",
        whole.usage.output_tokens,
    )
    assert end.usage.output_tokens_details == whole.usage.output_tokens_details
    assert start.message.usage.input_tokens == whole.usage.input_tokens


def test_a_call_that_max_tokens_cut_off(service):
    cut = CALLS[: CALLS.index('"Łódź"}}') + 4]
    say(service, cut, reason=FinishReason.LENGTH)
    fields = {"max_tokens": len(service.engine.tokens)}
    whole = Message.model_validate(ask(service, **fields).json())
    *events, end, _ = parsed([ask(service, **fields, stream=True).content])[1:]
    blocks = [block.model_dump(exclude={"parsed_output"}) for block in whole.content]
    assert without_ids(joined(events)) == without_ids(blocks)
    assert whole.stop_reason == end.delta.stop_reason == "max_tokens"
    say(service, cut, reason=FinishReason.LENGTH)
    assert ask(service, max_tokens=5000).json()["stop_reason"] == "model_context_window_exceeded"


def test_with_no_tools_calls_are_text(service):
    say(service, 'So: <tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    (block,) = ask(service, tools=[], thinking=None).json()["content"]
    assert block["type"] == "text" and "get_time" in block["text"]


def test_an_answers_calls_are_in_the_next_prompt(service):
    say(service, CALLS)
    said = ask(service).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"of {block['name']}"}
        for block in said
        if block["type"] == "tool_use"
    ]
    messages = [*BODY["messages"], {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": results})
    body = {"messages": messages, "thinking": BODY["thinking"]}
    counted = post(service, body, "/v1/messages/count_tokens").json()
    say(service, "Sunny.")
    answer = ask(service, messages=messages, tools=None)
    assert answer.json()["content"][0]["text"] == "Sunny."
    assert counted["input_tokens"] == answer.json()["usage"]["input_tokens"]
    prompt = service.tokenizer.decode(service.engine.requests[-1].prompt_token_ids)
    assert json.dumps({"place": "Łódź"}, ensure_ascii=False) in prompt
    assert "of get_weather" in prompt and "of get_time" in prompt
