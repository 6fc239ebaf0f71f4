"""Tools and reasoning in a chat: what a model writes becomes OpenAI's messages and chunks."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from tests.server.generation.test_http_generation import FakeEngine
from tests.server.in_process_grammars import InProcessGrammars

from quire.core.request import FinishReason, SequenceOutput
from quire.server.app import create_app
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.http.guard import AccessConfig
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect_choice import find_dialect

HERMES = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{{ tools | tojson if tools else '' }}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
BODY = {
    "messages": [{"role": "user", "content": "What's up in Łódź?"}],
    "tools": [WEATHER, TIME],
    "max_tokens": 200,
}
CALLS = (
    "<think>\nHm, Łódź.\n</think>\n\nI look."
    '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Łódź"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


class Speaker(FakeEngine):
    """Answers each choice with the tokens of a text, so many in an output."""

    tokens: tuple[int, ...] = ()
    step = 1
    reason = FinishReason.STOP

    def generate(self, requests, sink):
        stream = super().generate(requests, sink)
        for request in requests:
            for branch in range(request.n):
                asyncio.get_running_loop().call_soon(self._play, stream, request, branch, 0)
        return stream

    def _play(self, stream, request, branch, at):
        tokens = self.tokens[at : at + self.step]
        is_last = at + self.step >= len(self.tokens)
        reason = self.reason if is_last else None
        stream.push(SequenceOutput(request.request_id, branch, tokens, 0, reason))
        if not is_last:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._play, stream, request, branch, at + self.step)


@pytest.fixture
def service(tokenizer):
    template = ChatTemplate({"default": HERMES}, {})
    dialect = find_dialect(None, "hermes")
    grammars = GrammarChecks(InProcessGrammars(dialect, tokenizer))
    return Service(Speaker(), tokenizer, template, "mine", dialect=dialect, grammars=grammars)


def say(service, text, reason=FinishReason.STOP, step=1):
    end = (0,) if reason is FinishReason.STOP else ()  # an end token
    service.engine.tokens = (*service.tokenizer.encode(text, add_special_tokens=False), *end)
    service.engine.reason, service.engine.step = reason, step


def post(service, body, path="/v1/chat/completions"):
    async def send():
        app = create_app(ServedModels.of(service), AccessConfig())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, json=body)

    return asyncio.run(send())


def chunks(service, body):
    answer = post(service, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def merged(found):
    """The message that a client puts together from chunks, and why it ended."""
    message, reason = {}, None
    for chunk in found:
        (choice,) = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                (call,) = value
                calls = message.setdefault("tool_calls", [])
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    assert set(call) == {"function"} and set(call["function"]) == {"arguments"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            else:
                before = message.get(name)
                message[name] = value if before is None else before + (value or "")
    return message, reason


def without_ids(calls):
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") for call in calls)
    return [
        (call["type"], call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


def test_reasoning_text_and_calls_are_told_apart(service):
    say(service, CALLS)
    answer = post(service, BODY).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == message["reasoning"] == "Hm, Łódź."
    assert message["content"] == "I look."
    assert without_ids(message["tool_calls"]) == [
        ("function", "get_weather", '{"place": "Łódź"}'),
        ("function", "get_time", "{}"),
    ]
    details = answer["usage"]["completion_tokens_details"]
    num_tokens = answer["usage"]["completion_tokens"]
    assert num_tokens == len(service.engine.tokens)
    assert 4 < details["reasoning_tokens"] < num_tokens / 2


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_prediction_counts_in_calls_as_well(service, step):
    """The engine gets its tokens; whole answers and streams count alike, in steps of any length."""
    say(service, CALLS, step=step)
    predicted = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Łódź"}}\n</tool_call>'
    body = BODY | {"n": 2, "prediction": {"type": "content", "content": predicted}}
    details = post(service, body).json()["usage"]["completion_tokens_details"]
    tokens = service.tokenizer.encode_continuation(predicted)
    assert service.engine.requests[-1].prediction_token_ids == tuple(tokens)
    num_accepted = details["accepted_prediction_tokens"]
    assert len(tokens) <= num_accepted <= 2 * len(tokens)
    assert details["rejected_prediction_tokens"] == 2 * len(tokens) - num_accepted
    *_, last = chunks(service, body | {"stream_options": {"include_usage": True}})
    assert last["usage"]["completion_tokens_details"] == details
    plain = post(service, BODY | {"prediction": None}).json()
    assert list(plain["usage"]["completion_tokens_details"]) == ["reasoning_tokens"]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_stream_says_what_the_whole_answer_says(service, step):
    say(service, CALLS, step=step)
    whole = post(service, BODY).json()
    found = chunks(service, BODY | {"stream_options": {"include_usage": True}})
    *found, usage = found
    assert usage["usage"] == whole["usage"]
    first = found[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": None}
    message, reason = merged(found)
    (choice,) = whole["choices"]
    assert reason == choice["finish_reason"]
    assert without_ids(message.pop("tool_calls")) == without_ids(choice["message"]["tool_calls"])
    assert message == {name: choice["message"][name] for name in message}


def test_a_message_that_only_calls_has_no_content(service):
    say(service, CALLS.partition("I look.")[2])
    assert post(service, BODY).json()["choices"][0]["message"]["content"] is None
    message, _ = merged(chunks(service, BODY))
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_text_without_calls_ends_with_stop(service):
    say(service, "Fine. <tool_cal")
    (choice,) = post(service, BODY).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Fine. <tool_cal", "stop")
    assert "tool_calls" not in choice["message"]
    message, reason = merged(chunks(service, BODY))
    assert (message, reason) == ({"role": "assistant", "content": "Fine. <tool_cal"}, "stop")


def test_a_call_that_is_cut_off_is_there_as_far_as_it_came(service):
    say(service, CALLS[: CALLS.index('ź"}')], FinishReason.LENGTH)
    (choice,) = post(service, BODY).json()["choices"]
    assert choice["finish_reason"] == "length"
    ((_, name, arguments),) = without_ids(choice["message"]["tool_calls"])
    assert (name, arguments) == ("get_weather", '{"place": "Łód')


@pytest.mark.parametrize("more", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
def test_without_tools_to_call_a_call_is_text(service, more):
    written = CALLS.partition("I look.")[2]
    say(service, written)
    (choice,) = post(service, BODY | more).json()["choices"]
    assert choice["message"]["content"] == written
    assert choice["finish_reason"] == "stop"
    assert merged(chunks(service, BODY | more))[0]["content"] == written


@pytest.mark.parametrize("more", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_can_be_left_out(service, more):
    say(service, CALLS)
    answer = post(service, BODY | more).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is message["reasoning_content"] is None
    assert message["content"] == "I look."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 4
    assert not {"reasoning", "reasoning_content"} & set(merged(chunks(service, BODY | more))[0])


@pytest.mark.parametrize(
    ("more", "ending"),
    [
        ({}, "assistant\n"),
        ({"reasoning_effort": "low"}, "assistant\nlow"),
        ({"reasoning": {"effort": "high"}}, "assistant\nhigh"),
        ({"reasoning_effort": "none"}, "assistant\n<think>\n\n</think>\n"),
        ({"reasoning": {"enabled": False}}, "assistant\n<think>\n\n</think>\n"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "assistant\n<think>\n\n</think>\n",
        ),
    ],
)
def test_thinking_options_reach_the_template(service, more, ending):
    body = {"messages": BODY["messages"], "tools": BODY["tools"]} | more
    say(service, "Yes.</think>")
    answer = post(service, body | {"return_token_ids": True}).json()
    prompt = service.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith(ending)
    assert json.dumps(WEATHER["function"]["name"]) in prompt
    counted = post(service, body, "/tokenize").json()
    assert counted["tokens"] == answer["prompt_token_ids"]


def test_default_template_kwargs_hold_unless_the_call_overrides_them(service):
    service = replace(service, default_chat_template_kwargs={"enable_thinking": False})
    for more, ending in (
        ({}, "</think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n"),
        ({"reasoning_effort": "low"}, "low"),
    ):
        counted = post(service, {"messages": BODY["messages"]} | more, "/tokenize").json()
        assert service.tokenizer.decode(counted["tokens"]).endswith(ending)


def test_logprobs_come_with_the_first_chunk_of_their_tokens(service):
    say(service, CALLS, step=3)
    found = chunks(service, BODY | {"return_token_ids": True})
    told = [token for chunk in found for token in chunk["choices"][0].get("token_ids") or []]
    assert tuple(told) == service.engine.tokens


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "tools", "only functions"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "not among the tools: get_weather, get_time",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [WEATHER["function"]]}, "functions", "old form of tools"),
        ({"function_call": {"name": "f"}}, "function_call", "old form of tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "none"),
        (
            {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
            "reasoning_effort",
            "differ",
        ),
        ({"messages": [{"role": "tool"}]}, "messages", "no content"),
    ],
)
def test_invalid_tool_fields_are_refused_by_name(service, more, param, words):
    answer = post(service, BODY | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
