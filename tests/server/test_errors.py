"""Bad input gets OpenAI's error shape, names what is wrong, and hurts nobody else."""

import json

import openai
import pytest

from quire import errors
from quire.server.errors import error_body

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "hello", "max_tokens": 1}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}

BAD_COMPLETIONS = [
    ({"max_tokens": 1}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is an empty list"),
    ({"prompt": [[]]}, "prompt", "the prompt is empty"),
    ({"prompt": ["fine", ""]}, "prompt", "the prompt is empty"),
    ({"prompt": [5, 4096]}, "prompt", "token id 4096, but the vocabulary has 4096 tokens"),
    ({"prompt": [5, 2**70]}, "prompt", f"token id {2**70}"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [True]}, "prompt", "should be"),
    ({"prompt": {"text": "hello"}}, "prompt", "prompt should be a valid string, or should"),
    ({"prompt": ["hello", 3]}, "prompt", "should be"),
    ({"prompt": [1.5]}, "prompt", "should be"),
    ({"prompt": list(range(100)) * 20}, "prompt", "the prompt has 2000 tokens"),
    ({"prompt": "bad \ud800 text"}, "prompt", "half of a surrogate pair"),
    (HELLO | {"max_tokens": 0}, "max_tokens", "max_tokens is 0, but must be at least 1"),
    (HELLO | {"max_tokens": "5"}, "max_tokens", "should be a valid integer"),
    (HELLO | {"max_tokens": 2**80}, "max_tokens", "less than"),
    (HELLO | {"temperature": -1}, "temperature", "temperature is -1"),
    (HELLO | {"temperature": "hot"}, "temperature", "should be a valid number"),
    (HELLO | {"temperature": float("nan")}, "temperature", "temperature is nan"),
    (HELLO | {"top_p": 0}, "top_p", "above 0"),
    (HELLO | {"top_k": 1.5}, "top_k", "should be a valid integer"),
    (HELLO | {"n": 0}, "n", "n is 0"),
    (HELLO | {"n": 2000}, "n", "n is 2000"),
    (HELLO | {"n": 1024, "prompt": ["a", "b"]}, None, "2048 generations at once"),
    (HELLO | {"n": True}, "n", "should be a valid integer"),
    (HELLO | {"stop": 3}, "stop", "stop should be a valid string, or should be a valid list"),
    (HELLO | {"stop": [""]}, "stop", "stop"),
    (HELLO | {"stream": "yes"}, "stream", "should be a valid boolean"),
    (HELLO | {"logprobs": 50}, "logprobs", "logprobs is 50, above the bound of 20"),
    (HELLO | {"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
    (HELLO | {"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    (HELLO | {"stop_token_ids": [5000]}, "stop_token_ids", "5000"),
    (HELLO | {"min_tokens": 9}, "min_tokens", "above max_tokens"),
    (HELLO | {"priority": 2**40}, "priority", "less than"),
    (HELLO | {"seed": 2**65}, "seed", "seed is"),
    (HELLO | {"tempratur": 1}, "tempratur", "did you mean temperature?"),
    (HELLO | {"wholly_unknown": 1}, "wholly_unknown", "unknown field 'wholly_unknown'"),
    (HELLO | {"suffix": "end"}, "suffix", "suffix is not supported yet"),
    (HELLO | {"best_of": 4}, "best_of", "not supported yet"),
    (HELLO | {"tools": []}, "tools", "unknown field 'tools'"),
    (HELLO | {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "can't be streamed"),
    (HELLO | {"stream_options": {"include_usage": True}}, "stream_options", "stream is not"),
    (
        HELLO | {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "did you mean include_usage?",
    ),
]
BAD_CHATS = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "half of a surrogate pair"),
    ({"messages": "hello"}, "messages", "should be a valid list"),
    ({"messages": ["hello"]}, "messages.0", "should be a valid dictionary"),
    ({"messages": [{"content": "hello"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages", "content of type int"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "only text is understood",
    ),
    (MESSAGES | {"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    (MESSAGES | {"logprobs": True, "top_logprobs": 21}, "logprobs", "above the bound of 20"),
    (
        {"messages": MESSAGES["messages"], "max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens should be greater than or equal to 1",
    ),
    (MESSAGES | {"max_completion_tokens": 3}, "max_completion_tokens", "both set"),
    (MESSAGES | {"tools": [{"type": "function"}]}, "tools", "tools is not supported yet"),
    (MESSAGES | {"functions": [{}]}, "functions", "not supported yet"),
    (MESSAGES | {"audio": {}}, "audio", "not supported yet"),
    (MESSAGES | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (MESSAGES | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    (MESSAGES | {"prompt": "hello"}, "prompt", "unknown field"),
]


def check_error(answer, status, param, message):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert message in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [(COMPLETIONS, *case) for case in BAD_COMPLETIONS] + [(CHAT, *case) for case in BAD_CHATS],
)
def test_a_bad_request_is_refused_by_name(http, path, body, param, message):
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = check_error(answer, 400, param, message)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [BAD_COMPLETIONS[5][0], {"prompt": ""}])
def test_a_stream_that_is_refused_has_a_status_too(http, body):
    check_error(http.post(COMPLETIONS, json=body | {"stream": True}), 400, "prompt", "prompt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "hello"', "the body is not valid JSON"),
        (b"", ""),
        (b"null", ""),
        (b"[1, 2]", "the body must be a JSON object"),
        (b'"text"', "the body must be a JSON object"),
        (b'{"prompt": "\xff\xfe"}', ""),
        (b"[" * 100_000, ""),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(http, content, message):
    answer = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    check_error(answer, 400, None, message)
    assert http.post(COMPLETIONS, json=HELLO).status_code == 200  # and it goes on serving


def test_unknown_paths_methods_and_models(http, client):
    check_error(http.get("/v1/nothing"), 404, None, "there is no /v1/nothing here")
    wrong = http.get(COMPLETIONS)
    check_error(wrong, 405, None, "does not take GET; use POST")
    assert wrong.headers["allow"] == "POST"
    answer = http.post(COMPLETIONS, json=HELLO | {"model": "gpt-4"})
    error = check_error(answer, 404, "model", "the model 'gpt-4' is not served here")
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES["messages"])


def test_fields_that_ask_for_nothing_are_accepted(http):
    harmless = {
        "model": None,
        "temperature": None,
        "stream": None,
        "user": "someone",
        "tools": None,
        "functions": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert http.post(CHAT, json=MESSAGES | harmless).status_code == 200
    plain = {"suffix": None, "best_of": 2, "n": 2, "logit_bias": None}
    assert http.post(COMPLETIONS, json=HELLO | plain).status_code == 200


@pytest.mark.parametrize(
    ("error", "kind", "param"),
    [
        (errors.InvalidRequestError("x", "prompt"), "invalid_request_error", "prompt"),
        (errors.OverloadedError("x"), "rate_limit_error", None),
        (errors.EngineDeadError("x"), "service_unavailable_error", None),
        (errors.StepFailedError("x"), "server_error", None),
    ],
)
def test_each_error_has_its_type(error, kind, param):
    body = error_body(error)["error"]
    assert body == {"message": "x", "type": kind, "param": param, "code": error.code}
