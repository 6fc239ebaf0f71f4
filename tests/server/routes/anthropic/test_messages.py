"""/v1/messages through Anthropic's own client, on the embedded model."""

import json

import anthropic
import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
GREEDY = {"model": "embedded", "max_tokens": 90, "extra_body": {"temperature": 0}}
RULES = "You explain Python's standard library in a few words. " * 12
EVENT = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def talker(server, http):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def events_of(answer):
    """(name, data) of each event of a stream that was read whole."""
    found = []
    for each in answer.text.split("\n\n")[:-1]:
        name, data = each.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_the_embedded_model_answers(talker):
    answer = talker.messages.create(**GREEDY, messages=QUESTION)
    assert answer.id.startswith("msg_") and answer._request_id.startswith("req-")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "embedded")
    (block,) = answer.content
    assert block.type == "text" and "path" in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens > 3
    assert answer.usage.output_tokens_details.thinking_tokens == 0


def test_it_is_the_chat_s_answer(talker, client):
    chat = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "system", "content": RULES}, *QUESTION],
        max_tokens=20,
        temperature=0,
    )
    answer = talker.messages.create(**GREEDY | {"max_tokens": 20}, system=RULES, messages=QUESTION)
    assert answer.content[0].text == chat.choices[0].message.content
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens


def test_the_stream_joined_is_the_whole_answer(talker, http):
    whole = talker.messages.create(**GREEDY, messages=QUESTION)
    with talker.messages.stream(**GREEDY, messages=QUESTION) as stream:
        names = [event.type for event in stream if event.type not in ("text", "ping")]
        streamed = stream.get_final_message()
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.content[0].text == whole.content[0].text
    for part in ("stop_reason", "stop_sequence", "role", "model"):
        assert getattr(streamed, part) == getattr(whole, part), part
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    body = {"max_tokens": 90, "temperature": 0, "messages": QUESTION, "stream": True}
    answer = http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for name, data in events_of(answer):
        assert EVENT.validate_python(data).type == name == data["type"]


def test_why_it_ends(talker):
    short = talker.messages.create(**GREEDY | {"max_tokens": 3}, messages=QUESTION)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = talker.messages.create(**GREEDY, messages=QUESTION, stop_sequences=["xyz", "path"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "path")
    assert "path" not in "".join(block.text for block in stopped.content)
    with talker.messages.stream(**GREEDY, messages=QUESTION, stop_sequences=["path"]) as stream:
        assert stream.get_final_message().stop_sequence == "path"


def test_with_no_max_tokens_at_all_the_prompt_is_only_cached(talker):
    """As Anthropic documents it: the cache is warmed, and nothing generated."""
    asked = {"messages": QUESTION, "system": f"Warm. {RULES}"}
    none = talker.messages.create(**GREEDY | {"max_tokens": 0}, **asked)
    assert (none.content, none.stop_reason) == ([], "max_tokens")
    assert none.usage.output_tokens == 0
    assert none.usage.cache_read_input_tokens < 0.1 * none.usage.input_tokens
    with talker.messages.stream(**GREEDY | {"max_tokens": 0}, **asked) as stream:
        streamed = stream.get_final_message()
    assert (streamed.content, streamed.stop_reason) == ([], "max_tokens")
    assert streamed.usage.output_tokens == 0
    later = talker.messages.create(**GREEDY | {"max_tokens": 1}, **asked)
    assert later.usage.cache_read_input_tokens > 0.9 * later.usage.input_tokens


def test_max_tokens_is_a_bound_and_no_wish(talker, http):
    long = [{"role": "user", "content": "import os\n" * 330}, {"role": "assistant", "content": "a"}]
    body = {"max_tokens": 32_000, "messages": long, "temperature": 0, "stop_sequences": None}
    answer = http.post("/v1/messages", json=body).json()
    usage = answer["usage"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert (answer["stop_reason"], num_tokens) == ("model_context_window_exceeded", 1024)
    with pytest.raises(anthropic.BadRequestError, match="prompt"):
        talker.messages.create(
            **GREEDY, messages=[{"role": "user", "content": "import os\n" * 900}]
        )


def test_a_last_message_of_the_assistant_is_gone_on_with(talker, client):
    begun = [*QUESTION, {"role": "assistant", "content": "It joins"}]
    answer = talker.messages.create(**GREEDY, messages=begun)
    chat = client.chat.completions.create(
        model="embedded",
        messages=begun,
        temperature=0,
        max_tokens=90,
        extra_body={"continue_final_message": True},
    )
    assert answer.content[0].text == chat.choices[0].message.content


def test_a_line_that_changes_at_every_call_leaves_the_prefix_cached(talker):
    def ask(line, question):
        rules = [{"type": "text", "text": line}, {"type": "text", "text": RULES * 4}]
        return talker.messages.create(
            **GREEDY | {"max_tokens": 2},
            system=rules,
            messages=[{"role": "user", "content": question}],
        ).usage

    line = "x-anthropic-billing-header: cc_version=2.1.197.{}; cch=0;"
    first = ask(line.format("1c0"), "Name three modules.")
    again = ask(line.format("a9f"), "Name three modules.")
    num_tokens = again.input_tokens + again.cache_read_input_tokens
    assert num_tokens == first.input_tokens + first.cache_read_input_tokens > 500
    assert again.cache_read_input_tokens >= 0.99 * num_tokens


def test_hints_are_accepted_and_unknown_fields_are_named(http):
    hints = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "betas": ["a"],
        "cache_control": {"type": "ephemeral"},
    }
    body = {"max_tokens": 3, "messages": QUESTION} | hints
    plain = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b"})
    assert plain.status_code == 200 and "x-ignored-fields" not in plain.headers
    search = {"type": "web_search_20250305", "name": "web_search"}
    body |= {"context_management": {"edits": []}, "mcp_servers": [{}], "n": 2, "tools": [search]}
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/messages", json=body | more)
        assert answer.status_code == 200
        named = "context_management, mcp_servers, n, tools.0 (web_search_20250305)"
        assert answer.headers["x-ignored-fields"] == named


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"model": "claude-opus-4"}, 404, "not_found_error", "this server has 'embedded'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens is -1"),
        ({"messages": None}, 400, "invalid_request_error", "messages is missing"),
        ({"messages": []}, 400, "invalid_request_error", "at least one message"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop"),
        ({"tools": [{}] * 4097}, 400, "invalid_request_error", "tools has 4097"),
        ({"stop_sequences": ["x"] * 65}, 400, "invalid_request_error", "stop_sequences has 65"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"deadline_s": 1e-9}, 408, "timeout_error", "deadline"),
    ],
)
def test_mistakes_are_named_in_anthropic_s_form(http, fields, status, kind, words):
    body = {"max_tokens": 5, "messages": QUESTION} | fields
    for stream in (False, True):
        answer = http.post("/v1/messages", json=body | {"stream": stream})
        found = answer.json()
        assert (answer.status_code, found["type"]) == (status, "error")
        assert found["error"]["type"] == kind and words in found["error"]["message"]
        assert found["request_id"] == answer.headers["x-request-id"]


def test_a_key_comes_as_anthropic_s_client_sends_it(guarded):
    plain = {"max_tokens": 2, "messages": QUESTION}
    for path, body in (("/v1/messages", plain), ("/v1/messages/count_tokens", plain)):
        known = httpx.post(guarded.url + path, json=body, headers={"x-api-key": "bob-key-1"})
        assert known.status_code == 200
        refused = httpx.post(guarded.url + path, json=body, headers={"x-api-key": "x"})
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"
