"""Each bound of a call: at it all is well, above it the field and the bound are named."""

import pytest

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from quire.server.limits import (
    MAX_WORD_CHARACTERS,
    CallLimits,
    check_text,
    check_whole_answer,
)
from quire.server.routes.endpoint import check_parsed
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest

LIMITS = CallLimits(max_prompts=3, max_n=4, max_choices=8, max_stop_strings=2, max_list_length=5)
MAX_LOGPROBS = 20


def chat(**fields):
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "hello"}]} | fields
    )


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "hello"} | fields)


AT_AND_ABOVE = [
    (completion, "prompt", ["a"] * 3, ["a"] * 4),
    (completion, "prompt", [[1]] * 3, [[1]] * 4),
    (completion, "n", 4, 5),
    (completion, "stop", ["a", "b"], ["a", "b", "c"]),
    (completion, "stop_token_ids", [1] * 5, [1] * 6),
    (completion, "allowed_token_ids", [1] * 5, [1] * 6),
    (completion, "bad_words", ["a"] * 5, ["a"] * 6),
    (completion, "bad_words", ["a" * MAX_WORD_CHARACTERS], ["a" * (MAX_WORD_CHARACTERS + 1)]),
    (completion, "logit_bias", dict.fromkeys("12345", 1), dict.fromkeys("123456", 1)),
    (completion, "logprobs", 20, 21),
    (completion, "logprobs", -1, -2),
    (completion, "prompt_logprobs", 20, 21),
    (chat, "n", 4, 5),
    (chat, "stop", ["a", "b"], ["a", "b", "c"]),
    (chat, "prompt_logprobs", 20, 21),
]


def check_body(body):
    LIMITS.check_n(body.n)
    LIMITS.check(body, body.num_prompts, MAX_LOGPROBS)


def check(make, **fields):
    """As a call is checked: before its lists are looked into, and once more."""
    kind = CompletionRequest if make is completion else ChatCompletionRequest
    check_parsed(fields, kind, LIMITS, 1000)
    check_parsed({"extra_body": fields}, kind, LIMITS, 1000)
    check_body(make(**fields))


@pytest.mark.parametrize(("make", "name", "good", "bad"), AT_AND_ABOVE)
def test_a_bound_is_kept_to_and_named(make, name, good, bad):
    check(make, **{name: good})
    with pytest.raises(InvalidRequestError, match=f"^{name} ") as caught:
        check(make, **{name: bad})
    assert caught.value.param == name


class Unlooked:
    """Fails where any of its attributes is read."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [["a"]] + [Unlooked()] * 3},
        {"prompt": [1] + [Unlooked()] * 999},
        {"stop": [Unlooked()] * 3},
        {"bad_words": [Unlooked()] * 6},
        {"logit_bias": dict.fromkeys(range(6), Unlooked())},
        {"chat_template_kwargs": dict.fromkeys(range(10_001), Unlooked())},
        {"chat_template_kwargs": {"a": [[1] * 5000, [1] * 5000]}},
    ],
)
def test_lists_that_are_too_long_are_refused_by_their_lengths(fields):
    kind = CompletionRequest if "prompt" in fields else ChatCompletionRequest
    with pytest.raises(InvalidRequestError) as caught:
        check_parsed(fields, kind, LIMITS, 1000)
    assert caught.value.param == next(iter(fields))
    with pytest.raises(InvalidRequestError) as caught:
        check_parsed({"extra_body": fields}, kind, LIMITS, 1000)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "x",
        {"prompt": []},
        {"prompt": {"a": 1}},
        {"stop": 5, "logit_bias": [], "extra_body": 3},
        {"chat_template_kwargs": {"a": {"b": [1] * 9_998}}},
        {"prompt": [1] * 999},
    ],
)
def test_other_mistakes_are_left_to_later_checks(value):
    for kind in (CompletionRequest, ChatCompletionRequest):
        check_parsed(value, kind, LIMITS, 1000)


def test_likeliest_tokens_of_a_chat_have_their_own_name():
    check_body(chat(logprobs=True, top_logprobs=20))
    for count in (21, -2):
        with pytest.raises(
            InvalidRequestError, match=f"top_logprobs is {count}.*at most 20"
        ) as bad:
            check_body(chat(logprobs=True, top_logprobs=count))
        assert bad.value.param == "top_logprobs"


def test_the_choices_of_all_prompts_are_bounded_together():
    check_body(completion(prompt=["a"] * 2, n=4))
    with pytest.raises(InvalidRequestError, match=r"12 choices.*bound of 8") as caught:
        check_body(completion(prompt=["a"] * 3, n=4))
    assert caught.value.param == "n"


def test_token_ids_of_one_prompt_are_no_prompts():
    check_body(completion(prompt=list(range(100))))


def test_values_that_mean_nothing_are_left_to_the_sampling_params():
    check_body(completion(n=-1))
    with pytest.raises(InvalidRequestError, match="n is -1"):
        completion(n=-1).to_params()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_prompts", 0),
        ("max_n", 0),
        ("max_n", 1025),
        ("max_choices", 0),
        ("max_stop_strings", 65),
        ("max_list_length", -1),
    ],
)
def test_a_bound_that_can_not_be_kept_to_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is {value}, but must be at least 1"):
        CallLimits(**{name: value})


def test_the_bounds_reach_the_client_by_name(server):
    wish = {"prompt": "x", "max_tokens": 1}
    for fields, param in (
        ({"n": 10_000}, "n"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"logprobs": 10_000}, "logprobs"),
    ):
        answer = server.http.post("/v1/completions", json=wish | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_prompt_logprobs_of_a_whole_answer_are_bounded(server):
    fields = {"prompt": [[5] * 1000] * 8, "n": 8, "max_tokens": 1, "seed": 1}
    for more in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
        answer = server.http.post("/v1/completions", json=fields | more)
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert "1344000 log-probabilities" in error["message"]


def test_a_text_that_no_tokens_could_hold_is_not_looked_at(tokenizer):
    longest = 10 * tokenizer.longest_token_bytes
    check_text("x" * longest, tokenizer, 10, "prompt")
    with pytest.raises(PromptTooLongError, match=r"max_model_len \(10\)") as caught:
        check_text("x" * (longest + 1), tokenizer, 10, "messages")
    assert caught.value.param == "messages"


def test_a_whole_answer_is_bounded_by_what_it_might_become():
    def requests(n, max_tokens, logprobs):
        params = DecodingParams(max_tokens=max_tokens, logprobs=logprobs)
        return [Request("a", [1] * 100, params, n)]

    check_whole_answer(requests(1, 2**31 - 1, 20), 4096, bytes_per_logprob=96)
    check_whole_answer(requests(1024, 10_000, None), 4096, bytes_per_logprob=96)
    check_whole_answer(requests(1024, 180, 20), 4096, bytes_per_logprob=96)
    sentence = r"might have 85929984 log-probabilities, about 2622 MiB, above the bound of 384 MiB"
    with pytest.raises(InvalidRequestError, match=sentence) as found:
        check_whole_answer(requests(1024, 10_000, 20), 4096, bytes_per_logprob=32)
    assert found.value.param == "logprobs"


def test_it_counts_what_the_answer_will_weigh():
    request = [Request("a", [1] * 100, DecodingParams(max_tokens=200, logprobs=20), 1024)]
    check_whole_answer(request, 4096, bytes_per_logprob=32)
    with pytest.raises(InvalidRequestError, match="about 393 MiB"):
        check_whole_answer(request, 4096, bytes_per_logprob=96)
