"""/v1/responses through OpenAI's own client and plain HTTP, on the embedded model."""

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
from tests.server.responding import check_whole, items_of, read_events

QUESTION = "What does os.path.join do?"
GREEDY = {"model": "embedded", "temperature": 0, "input": QUESTION}
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def chat_text(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="embedded", temperature=0, messages=messages)
    return answer.choices[0].message.content


def stream(http, **fields):
    answer = http.post("/v1/responses", json=GREEDY | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def test_it_says_what_a_chat_says(client, chat_text):
    answer = client.responses.create(**GREEDY)
    check_whole(answer.to_dict())
    assert answer.output_text == chat_text and answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    (message,) = answer.output
    assert (message.role, message.status) == ("assistant", "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.store is False


def test_a_stream_says_the_same(http, client, chat_text):
    events = stream(http)
    (item,) = items_of(events)
    assert item["content"][0]["text"] == chat_text
    last = events[-1]
    assert last["type"] == "response.completed"
    whole = client.responses.create(**GREEDY).to_dict()
    fresh = ("id", "created_at", "completed_at", "output", "usage")
    assert {key: value for key, value in last["response"].items() if key not in fresh} == {
        key: value for key, value in whole.items() if key not in fresh
    }
    assert last["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_clients_own_stream_takes_it(client, chat_text):
    with client.responses.stream(**GREEDY) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(deltas) == final.output_text == chat_text


def test_the_async_client_streams(server, chat_text):
    async def text():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            events = await client.responses.create(**GREEDY, stream=True)
            return "".join([e.delta async for e in events if e.type.endswith("text.delta")])

    assert asyncio.run(text()) == chat_text


def test_an_answer_that_is_cut_short_is_incomplete(http, client):
    whole = client.responses.create(**GREEDY, max_output_tokens=3)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete" and whole.completed_at is None
    events = stream(http, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert items_of(events)[0]["content"] == [part.to_dict() for part in whole.output[0].content]


def test_logprobs_are_a_chats(http, client):
    fields = {"max_output_tokens": 6, "include": [LOGPROBS], "top_logprobs": 2}
    whole = client.responses.create(**GREEDY, **fields).to_dict()["output"][0]["content"][0]
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(
        model="embedded",
        messages=messages,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    assert whole["logprobs"] == chat.to_dict()["choices"][0]["logprobs"]["content"]
    events = stream(http, **fields)
    assert items_of(events)[0]["content"][0] == whole
    deltas = [each for event in events if "delta" in event for each in event["logprobs"]]
    assert deltas == whole["logprobs"]


def test_a_history_of_items_is_the_chats_history(client, http):
    items = [
        {"role": "user", "content": "hello"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    given = GREEDY | {"input": items, "instructions": "be brief", "max_output_tokens": 8}
    answer = client.responses.create(**given)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": QUESTION},
    ]
    chat = client.chat.completions.create(
        model="embedded", temperature=0, max_tokens=8, messages=messages
    )
    assert answer.output_text == chat.choices[0].message.content
    counted = client.responses.input_tokens.count(input=items, instructions="be brief")
    assert counted.input_tokens == answer.usage.input_tokens == chat.usage.prompt_tokens


class Reading(pydantic.BaseModel):
    unit: Literal["C", "F"]
    degrees: Literal[1, 2, 3]


def test_a_form_is_obeyed_and_parsed(client, http):
    no_blanks = {"frequency_penalty": 2}  # which the small model repeats for ever
    answer = client.responses.parse(**GREEDY, text_format=Reading, extra_body=no_blanks)
    assert isinstance(answer.output_parsed, Reading)
    form = {"type": "json_schema", "name": "r", "schema": {"enum": [["a"], ["b"]]}}
    (item,) = items_of(stream(http, text={"format": form}))
    assert json.loads(item["content"][0]["text"]) in (["a"], ["b"])
    bad = http.post(
        "/v1/responses", json=GREEDY | {"text": {"format": form | {"schema": {"$ref": "#/x"}}}}
    )
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "text.format")


def test_ignored_fields_are_named_in_a_header(http):
    tools = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    fields = {"max_output_tokens": 1, "weather": "fine", "tools": tools}
    answer = http.post("/v1/responses", json=GREEDY | fields)
    assert answer.headers["x-ignored-fields"] == "weather, tools[1] (web_search)"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"input": None}, 400, "input", None),
        ({"input": [{"type": "web_search_call"}]}, 400, "input", None),
        ({"input": "word " * 5000}, 400, "input", "context_length_exceeded"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"temperature": 200}, 400, "temperature", None),
        ({"background": True}, 400, "background", None),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", None),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format", None),
        ({"tools": [{"type": "web_search"}]}, 400, "tools", None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_mistake_has_its_status_before_anything_is_streamed(
    http, fields, status, param, code, streams
):
    body = {
        key: value
        for key, value in (GREEDY | {"stream": streams} | fields).items()
        if value is not None
    }
    answer = http.post("/v1/responses", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert code is None or error["code"] == code


def test_a_deadline_in_the_middle_of_a_stream_fails_the_response(http):
    fields = {
        "deadline_s": 0.1,
        "ignore_eos": True,
        "input": "import os\n",
        "max_output_tokens": 900,
        "temperature": 1.0,  # drafts would end greedy text, which repeats itself, too early
    }
    answer = http.post("/v1/responses", json=GREEDY | {"stream": True} | fields)
    if answer.status_code == 408:  # nothing came before it
        return
    *_, error, failed = read_events(answer.text)
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert "deadline" in error["message"] and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"


def test_nothing_is_stored_unless_the_server_was_told(client):
    answer = client.responses.create(**GREEDY, max_output_tokens=1, store=True)
    assert answer.store is False
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="--response-store-bytes"):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="--response-store-bytes"):
        client.responses.create(**GREEDY, previous_response_id=answer.id)
    with pytest.raises(openai.NotFoundError, match="not supported"):
        client.responses.cancel(answer.id)


def test_the_second_turn_finds_the_first(client):
    """All but the tokens of the first turn's last block."""
    items = [{"role": "user", "content": "import os\n" * 60}]
    first = client.responses.create(**GREEDY | {"input": items, "max_output_tokens": 40})
    items += [json.loads(item.to_json()) for item in first.output]
    items += [{"role": "user", "content": "and?"}]
    second = client.responses.create(**GREEDY | {"input": items, "max_output_tokens": 2})
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 16


def test_an_input_that_is_too_long_is_cut_where_that_is_asked_for(client):
    long = {"model": "embedded", "input": "import os\n" * 3000, "max_output_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.responses.create(**long)
    answer = client.responses.create(**long, truncation="auto")
    assert (answer.usage.input_tokens, answer.truncation) == (1023, "auto")
    counted = client.responses.input_tokens.count(
        model="embedded", input=long["input"], truncation="auto"
    )
    assert counted.input_tokens == 1023
