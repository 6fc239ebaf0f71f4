"""/v1/chat/completions through OpenAI's own client, on the embedded model."""

import asyncio
import json

import openai
import pytest

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.chat_template import ChatTemplate

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
GREEDY = {"model": "embedded", "temperature": 0}


def test_the_embedded_model_answers(client):
    answer = client.chat.completions.create(**GREEDY, messages=QUESTION)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "path" in choice.message.content
    assert "<|im_end|>" not in choice.message.content
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)


def test_the_prompt_is_the_rendered_template(client, tokenizer):
    text = ChatTemplate.from_folder(EMBEDDED_MODEL).render(QUESTION)
    ids = tokenizer.encode(text, add_special_tokens=False)
    chat = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=30)
    plain = client.completions.create(**GREEDY, prompt=ids, max_tokens=30)
    assert chat.usage.prompt_tokens == len(ids)
    assert chat.choices[0].message.content == plain.choices[0].text


def test_parts_of_text_are_understood(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    answers = [
        client.chat.completions.create(**GREEDY, messages=messages, max_tokens=12)
        for messages in (QUESTION, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_with_no_bound_an_answer_may_fill_the_context(client):
    long = [{"role": "user", "content": "import os\n" * 330}]
    answer = client.chat.completions.create(
        **GREEDY, messages=long, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert 16 < answer.usage.completion_tokens < 100
    assert answer.usage.total_tokens == 1024


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_bound_the_answer(client, name):
    answer = client.chat.completions.create(**GREEDY, messages=QUESTION, **{name: 3})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_the_stream_joined_is_the_whole_answer(client):
    wish = {
        "model": "embedded",
        "messages": QUESTION,
        "max_tokens": 25,
        "n": 3,
        "seed": 11,
        "temperature": 1.2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**wish)
    contents, logprobs, reasons = [""] * 3, [[], [], []], [None] * 3
    roles = [0] * 3
    for chunk in client.chat.completions.create(**wish, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == [1, 1, 1]
    assert len(set(contents)) == 3
    assert contents == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_the_async_client_streams_to_its_end(server, client):
    whole = client.chat.completions.create(**GREEDY, messages=QUESTION).choices[0].message.content

    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as talker:
            chunks = await talker.chat.completions.create(
                **GREEDY, messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in chunks]

    *pieces, last = asyncio.run(stream())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_logprobs_have_openais_shape(client):
    answer = client.chat.completions.create(
        **GREEDY, messages=QUESTION, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    joined = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert joined == answer.choices[0].message.content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the likeliest one
        assert entry.top_logprobs[0].token == entry.token


def test_logprobs_without_a_count_report_the_tokens_alone(client):
    answer = client.chat.completions.create(
        **GREEDY, messages=QUESTION, max_tokens=2, logprobs=True
    )
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content] == [[], []]


def test_a_final_message_is_continued(client):
    messages = [*QUESTION, {"role": "assistant", "content": "It joins"}]
    continued = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, extra_body={"continue_final_message": True}
    )
    without_header = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, extra_body={"add_generation_prompt": False}
    )
    fresh = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
    counts = [answer.usage.prompt_tokens for answer in (continued, without_header, fresh)]
    assert counts == sorted(set(counts))


def test_template_arguments_are_checked_by_the_template(client):
    with pytest.raises(openai.BadRequestError, match="exclude each other") as caught:
        client.chat.completions.create(
            **GREEDY,
            messages=QUESTION,
            extra_body={"continue_final_message": True, "add_generation_prompt": True},
        )
    assert caught.value.param == "continue_final_message"
    answer = client.chat.completions.create(
        **GREEDY,
        messages=QUESTION,
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices


def test_a_long_conversation_is_rendered_beside_the_loop(client):
    for num_words, words in ((2000, "the prompt has .* tokens"), (200_000, "characters")):
        with pytest.raises(openai.BadRequestError, match=rf"{words}.*max_model_len .*1024") as bad:
            client.chat.completions.create(
                **GREEDY, messages=[{"role": "user", "content": "word " * num_words}]
            )
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")


def test_a_beam_search_answers_as_well(client):
    answer = client.chat.completions.create(
        model="embedded",
        messages=QUESTION,
        n=2,
        extra_body={"use_beam_search": True, "length_penalty": 0.8},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    best, second = (choice.message.content for choice in answer.choices)
    assert "path" in best and best != second
    assert "<|im_end|>" not in best + second
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2


def test_a_streamed_beam_search_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="use_beam_search does not support") as caught:
        client.chat.completions.create(
            model="embedded", messages=QUESTION, stream=True, extra_body={"use_beam_search": True}
        )
    assert caught.value.body["param"] == "stream"


def chunks_of(http, **wish):
    """The chunks of a stream, as they stand in its events."""
    body = {"messages": QUESTION, "temperature": 0, "stream": True} | wish
    answer = http.post("/v1/chat/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_has_openais_chunks(http):
    wish = {"max_tokens": 5, "stream_options": {"include_usage": True}}
    first, *middle, end, usage = chunks_of(http, **wish)
    assert len({chunk["id"] for chunk in (first, *middle, end, usage)}) == 1
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in (*middle, end))
    (choice,) = first["choices"]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    for chunk in middle:
        (choice,) = chunk["choices"]
        assert set(choice["delta"]) == {"content"}
        assert choice["finish_reason"] is None
        del choice["delta"]["content"]
    assert all(chunk == middle[0] for chunk in middle), "only their texts differ"
    (choice,) = end["choices"]
    assert choice.pop("delta").keys() == {"content"}  # what the last token brings
    assert choice == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in (first, *middle, end))


def test_every_choice_of_a_stream_begins_with_its_role_and_ends_with_its_reason(http):
    chunks = chunks_of(http, max_tokens=4, n=3, temperature=1.0, seed=2)
    assert "usage" not in chunks[0]
    for index in range(3):
        deltas = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert [delta["delta"].get("role") for delta in deltas] == ["assistant"] + [None] * (
            len(deltas) - 1
        )
        assert [delta["finish_reason"] is None for delta in deltas] == [True] * (
            len(deltas) - 1
        ) + [False]


def test_a_stream_tells_token_ids_where_they_are_made(http, client):
    wish = {"max_tokens": 12, "stop": ["never seen"], "return_token_ids": True}
    chunks = chunks_of(http, **wish)
    whole = client.chat.completions.create(**GREEDY, messages=QUESTION, extra_body=wish)
    joined = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert joined == whole.choices[0].token_ids
    assert chunks[0]["prompt_token_ids"] == whole.prompt_token_ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


def test_deeply_nested_messages_are_refused_not_fatal(http):
    deep = "[" * 300 + "]" * 300
    for field in (f'"content": {deep}', f'"content": "x", "name": {deep}'):
        answer = http.post(
            "/v1/chat/completions",
            content=f'{{"messages": [{{"role": "user", {field}}}]}}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        assert "64 levels" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_other_parts_than_text_are_refused_by_name(client, kind):
    messages = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
    with pytest.raises(openai.BadRequestError, match=f"content part of type '{kind}'") as caught:
        client.chat.completions.create(**GREEDY, messages=messages)
    assert caught.value.param == "messages"


def test_the_clients_own_helper_for_streams_understands_ours(client):
    wish = {**GREEDY, "messages": QUESTION, "logprobs": True}
    whole = client.chat.completions.create(**wish)
    with client.chat.completions.stream(**wish, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= set(kinds)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_has_the_id_of_its_request(client):
    answer = client.chat.completions.create(
        **GREEDY, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-ID": "mine-7"}
    )
    assert answer._request_id == "mine-7"
