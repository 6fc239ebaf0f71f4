"""What clients of vLLM find in answers: nulls, usage in each chunk of a stream, and an echo."""

from dataclasses import replace

import pytest
from tests.server.routes.openai.test_chat_tools import BODY, CALLS, chunks, post, say, service

from quire.core.request import FinishReason
from quire.server.generation.answer_defaults import AnswerDefaults

__all__ = ["service"]  # a fixture

HELLO = {"role": "user", "content": "hello"}
CHAT = {"messages": [HELLO], "max_tokens": 6}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_fields_of_vllm_are_null_unless_requested(service):
    say(service, "hi")
    chat = post(service, CHAT).json()
    for name in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert chat[name] is None
    (choice,) = chat["choices"]
    assert choice["token_ids"] is choice["stop_reason"] is choice["logprobs"] is None
    assert choice["message"]["reasoning"] is choice["message"]["reasoning_content"] is None
    completion = post(service, {"prompt": "a"}, "/v1/completions").json()
    assert completion["service_tier"] is completion["kv_transfer_params"] is None
    (choice,) = completion["choices"]
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason", "logprobs"):
        assert choice[name] is None


def test_requested_fields_of_vllm_are_not_null(service):
    say(service, "hi")
    chat = post(service, CHAT | {"return_token_ids": True}).json()
    assert chat["prompt_token_ids"] and chat["choices"][0]["token_ids"]


def counts(found):
    return [chunk["usage"]["completion_tokens"] for chunk in found]


@pytest.mark.parametrize("is_forced", [True, False])
def test_each_chunk_has_the_usage_so_far_and_brings_more(service, is_forced):
    say(service, "one two three four", FinishReason.LENGTH)
    if is_forced:
        service = replace(service, answer_defaults=AnswerDefaults(includes_usage=True))
    found = chunks(service, CHAT if is_forced else CHAT | CONTINUOUS)
    assert found[-1]["choices"] == [] and found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert counts(found[:-1]) == list(range(len(found) - 1))
    assert counts(found)[-1] == len(found) - 2


def test_an_include_usage_of_false_goes_before_continuous_usage(service):
    say(service, "one two")
    options = {"include_usage": False, "continuous_usage_stats": True}
    found = chunks(service, CHAT | {"stream_options": options})
    assert not any(chunk.get("usage") for chunk in found)
    alone = chunks(service, CHAT | {"stream_options": {"continuous_usage_stats": True}})
    assert all(chunk["usage"] for chunk in alone)


def test_the_last_text_comes_with_the_reason(service):
    say(service, "one two", FinishReason.LENGTH)
    *others, last = chunks(service, CHAT)
    (choice,) = last["choices"]
    assert choice["finish_reason"] == "length" and choice["delta"] == {"content": " two"}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in others)


def test_a_call_and_the_reason_may_come_apart(service):
    say(service, CALLS)
    *_, last = chunks(service, BODY)
    assert last["choices"][0]["finish_reason"] == "tool_calls"


PARTS = [{"type": "text", "text": "An apple a day"}]
REFUSED = [{"type": "refusal", "refusal": "An apple a day"}]


@pytest.mark.parametrize("content", ["An apple a day", PARTS, REFUSED])
def test_a_chat_may_echo_the_message_that_it_goes_on_with(service, content):
    say(service, " keeps")
    saying = {"role": "assistant", "content": content}
    wish = {"messages": [HELLO, saying], "continue_final_message": True}
    for echo, begins in ((True, "An apple a day"), (False, "")):
        answer = post(service, wish | {"echo": echo}).json()
        assert answer["choices"][0]["message"]["content"] == f"{begins} keeps"
        found = chunks(service, wish | {"echo": echo})
        texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in found]
        assert "".join(texts) == f"{begins} keeps"
    assert post(service, CHAT | {"echo": True}).json()["choices"][0]["message"]["content"] == (
        " keeps"
    )


def test_all_wrong_keys_of_a_logit_bias_are_named(service):
    answer = post(service, CHAT | {"logit_bias": {"bad1": 1, "7": 1, "bad2": 2}})
    assert answer.status_code == 400
    assert "has the keys 'bad1', 'bad2', but" in answer.json()["error"]["message"]
