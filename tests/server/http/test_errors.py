"""Bad input gets OpenAI's error shape, names what is wrong, and hurts no other call."""

import json
import socket
import time

import openai
import pytest

from quire import errors
from quire.server.http.errors import error_body, error_response
from quire.server.http.guard import MAX_BODY_BYTES
from quire.server.service import UnknownModelError

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
    (HELLO | {"top_p": -0.1}, "top_p", "at least 0"),
    (HELLO | {"top_k": 1.5}, "top_k", "should be a valid integer"),
    (HELLO | {"n": 0}, "n", "n is 0"),
    (HELLO | {"n": 2000}, "n", "n is 2000"),
    (HELLO | {"n": 1024, "prompt": ["a", "b"]}, "n", "n is 1024, above this server's bound of 128"),
    (HELLO | {"n": True}, "n", "should be a valid integer"),
    (HELLO | {"stop": 3}, "stop", "stop should be a valid string, or should be a valid list"),
    (HELLO | {"stop": [""]}, "stop", "stop"),
    (HELLO | {"stream": "yes"}, "stream", "should be a valid boolean"),
    (HELLO | {"logprobs": 50}, "logprobs", "logprobs is 50, but must be at least 0 and at most 20"),
    (HELLO | {"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids"),
    (HELLO | {"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    (HELLO | {"stop_token_ids": [5000]}, "stop_token_ids", "5000"),
    (HELLO | {"min_tokens": 9}, "min_tokens", "above max_tokens"),
    (HELLO | {"priority": 2**40}, "priority", "less than"),
    (HELLO | {"seed": 2**65}, "seed", "seed is"),
    (HELLO | {"tempratur": 1}, "tempratur", "did you mean temperature?"),
    (HELLO | {"wholly_unknown": 1}, "wholly_unknown", "unknown field 'wholly_unknown'"),
    (HELLO | {"odd \ud800": 1}, "odd \\ud800", "the name of a field, 'odd \\ud800', has U+D800"),
    (HELLO | {"user": "x\ud800"}, "user", "user has U+D800 at position 1: half of a surrogate"),
    (HELLO | {"model": "\udc00"}, "model", "model has U+DC00"),
    (HELLO | {"cache_salt": "\ud800"}, "cache_salt", "cache_salt has U+D800 at position 0"),
    (HELLO | {"stop": "\udc00"}, "stop", "stop has U+DC00"),
    (HELLO | {"stop": ["a", "b\udc00"]}, "stop.1", "stop.1 has U+DC00 at position 1"),
    (HELLO | {"bad_words": ["\ud800"]}, "bad_words.0", "bad_words.0 has U+D800"),
    (HELLO | {"logit_bias": {"\ud800": 1}}, "logit_bias", "half of a surrogate pair"),
    (HELLO | {"extra_body": {"user": "\ud800"}}, "extra_body.user", "extra_body.user has U+D800"),
    (HELLO | {"suffix": "end"}, "suffix", "no tokens for filling a gap"),
    (HELLO | {"suffix": "end", "echo": True}, "suffix", "suffix and echo are both set"),
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
    (
        {"messages": [{"role": "user", "content": "\udfff"}]},
        "messages.0.content",
        "half of a surrogate pair",
    ),
    ({"messages": [{"role": "\udfff", "content": "a"}]}, "messages.0.role", "has U+DFFF"),
    ({"messages": [{"role": "user", "name": "\udfff"}]}, "messages.0.name", "has U+DFFF"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
        "messages.0.content.0.text",
        "has U+DFFF",
    ),
    (MESSAGES | {"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs.a.0", "U+D800"),
    ({"messages": "hello"}, "messages", "should be a valid list"),
    ({"messages": ["hello"]}, "messages.0", "should be a valid dictionary"),
    ({"messages": [{"content": "hello"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages", "content of type int"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "only text is supported",
    ),
    (MESSAGES | {"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    (MESSAGES | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    (
        {"messages": MESSAGES["messages"], "max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens should be greater than or equal to 1",
    ),
    (MESSAGES | {"max_completion_tokens": 3}, "max_completion_tokens", "both set"),
    (MESSAGES | {"tools": [{"type": "function"}]}, "tools", "tools[0] has no function"),
    (MESSAGES | {"functions": [{}]}, "functions", "the old form of tools"),
    (MESSAGES | {"audio": {}}, "audio", "not supported yet"),
    (MESSAGES | {"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
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
    check_error(http.get("/v1/nothing"), 404, None, "there is no /v1/nothing here; try /v1/")
    misspelt = http.post("/v1/chat/completion", json={})
    check_error(misspelt, 404, None, "here; did you mean /v1/chat/completions?")
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


ANSWERS = [
    (errors.InvalidRequestError("x", "prompt"), 400, "invalid_request_error", {}),
    (errors.RequestNeverFitsError("x", "prompt"), 422, "invalid_request_error", {}),
    (errors.AuthenticationError("x"), 401, "authentication_error", {"www-authenticate": "Bearer"}),
    (errors.OperatorOnlyError("x"), 403, "permission_error", {}),
    (UnknownModelError("x"), 404, "not_found_error", {}),
    (errors.DeadlineExceededError("x"), 408, "timeout_error", {"x-should-retry": "false"}),
    (errors.RequestTimeoutError("x"), 408, "timeout_error", {"connection": "close"}),
    (errors.BodyTooLongError("x"), 413, "invalid_request_error", {}),
    (errors.OverloadedError("x", 0.2), 429, "rate_limit_error", {"retry-after": "1"}),
    (errors.TokenRateError("x", 61.2), 429, "rate_limit_error", {"retry-after": "62"}),
    (errors.EngineDeadError("x"), 503, "service_unavailable_error", {"retry-after": "5"}),
    (errors.ServerDrainingError("x", 3.0), 503, "service_unavailable_error", {"retry-after": "3"}),
    (errors.StepFailedError("x"), 500, "server_error", {"x-should-retry": "false"}),
    (errors.RequestKillsEngineError("x"), 500, "server_error", {"x-should-retry": "false"}),
    (errors.SchedulerStalledError("x"), 500, "server_error", {}),
]
TOLD_IN_HEADERS = ("www-authenticate", "x-should-retry", "connection", "retry-after")


@pytest.mark.parametrize(("error", "status", "kind", "headers"), ANSWERS)
def test_each_error_has_its_answer(error, status, kind, headers):
    scope = {"type": "http"}
    answer = error_response(scope, error)
    param = getattr(error, "param", None)
    expected = {"message": "x", "type": kind, "param": param, "code": error.code}
    assert json.loads(answer.body) == error_body(error) == {"error": expected}
    assert answer.status_code == status
    assert {name: answer.headers[name] for name in TOLD_IN_HEADERS if name in answer.headers} == (
        headers
    )
    assert scope["state"] == {"error_code": error.code}


def kinds_below(kind):
    return {kind}.union(*map(kinds_below, kind.__subclasses__()))


def test_every_kind_of_error_has_a_code_of_its_own():
    """The engine's process names them by it, and operators count them by it."""
    kinds = [
        kind
        for kind in kinds_below(errors.QuireError)
        if kind.__module__.startswith("quire.") and "code" in vars(kind)  # else: its parent's
    ]
    codes = [kind.code for kind in kinds]
    assert len(kinds) > 15 and len(set(codes)) == len(codes)
    assert {kind.http_status for kind in kinds} <= {
        400,
        401,
        403,
        404,
        408,
        409,
        413,
        422,
        429,
        500,
        503,
    }


def test_the_operators_errors_are_not_told_to_clients():
    error = errors.CheckpointError("the folder /secret/model has no config.json")
    answer = error_response({"type": "http"}, error)
    body = json.loads(answer.body)["error"]
    assert (answer.status_code, body["code"]) == (503, "engine_dead")
    assert "/secret" not in body["message"] and "log says why" in body["message"]


def test_requests_that_never_fit_get_422(http):
    body = HELLO | {"use_beam_search": True, "n": 17}
    error = check_error(http.post(COMPLETIONS, json=body), 422, None, "max_num_seqs")
    assert error["code"] == "request_never_fits"


def test_a_body_that_is_announced_too_long_is_refused_before_it_is_sent(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 40000000\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_openais_client_has_a_class_for_each(client):
    body = {"model": "embedded", "prompt": "hello", "max_tokens": 1}
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(**body, n=17, extra_body={"use_beam_search": True})
    with pytest.raises(openai.APIStatusError, match="longer than") as caught:
        client.completions.create(**body | {"prompt": "x" * (33 << 20)})
    assert caught.value.status_code == 413


NESTED_WHERE = [
    (COMPLETIONS, '{"prompt": %s}'),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "nonsense": %s}'),
    (CHAT, '{"messages": [{"role": "user", "content": %s}]}'),
    (CHAT, '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}'),
    (CHAT, '{"messages": [{"role": "user", "content": "a"}], "tools": %s}'),
]


@pytest.mark.parametrize(("path", "body"), NESTED_WHERE)
def test_no_depth_of_nesting_is_too_much_for_the_server(http, path, body):
    """Around the depth at which Python's own stack ends, too."""
    for depth in (65, 250, 450, 500, 800, *range(900, 1000, 9), 5000, 100_000):
        for opening, inner, closing in (("[", "", "]"), ('{"a":', "1", "}")):
            content = body % (opening * depth + inner + closing * depth)
            headers = {"Content-Type": "application/json"}
            answer = http.post(path, content=content, headers=headers)
            assert answer.status_code == 400, (depth, answer.text)
            assert len(answer.json()["error"]["message"]) < 1000


HUGE_BODIES = {
    "open brackets": (b"", b"[", b""),
    "open objects": (b"", b'{"a":', b""),
    "wrong numbers": (b'{"prompt": [', b"0.5,", b"1]}"),
    "wrong lists": (b'{"prompt": [', b"[0.5],", b"[1]]}"),
    "too many ids": (b'{"prompt": [', b"1,", b"1]}"),
    "too many stops": (b'{"prompt": "a", "stop": [', b'"",', b'""]}'),
    "wrong stops": (b'{"prompt": "a", "stop": [', b"1,", b"1]}"),
    "many digits": (b'{"prompt": [', b"1", b"]}"),
    "a long model": (b'{"prompt": "a", "model": "', b"a", b'"}'),
    "a long name": (b'{"prompt": "a", "', b"a", b'": 1}'),
    "many names": (b'{"prompt": "a", "model": {', b'"aa":1,', b'"b":1}}'),
    "wrong messages": (b'{"messages": [', b"1,", b"1]}"),
    "empty messages": (b'{"messages": [', b"{},", b"{}]}"),
}
"""What a body begins with, repeats, and ends with."""


@pytest.mark.parametrize("name", HUGE_BODIES)
def test_a_huge_body_is_refused_without_a_stall(http, name):
    """The answer names one mistake, not millions, and does not repeat all that the client sent."""
    path = CHAT if "messages" in name else COMPLETIONS
    head, repeated, tail = HUGE_BODIES[name]
    content = head + repeated * ((MAX_BODY_BYTES - 64) // len(repeated)) + tail
    headers = {"Content-Type": "application/json"}
    started_s = time.monotonic()
    answer = http.post(path, content=content, headers=headers)
    assert time.monotonic() - started_s < 20  # on a quiet machine, a tenth of a second
    assert answer.status_code in (400, 404), answer.text[:1000]
    assert len(answer.content) < 4096
    assert http.post(COMPLETIONS, json=HELLO).status_code == 200
