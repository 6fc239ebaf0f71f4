"""What of a body is understood, what is refused by name, and what becomes of the rest."""

import pytest
from pydantic import ValidationError

from quire.core.sampling_params import SamplingParams
from quire.errors import InvalidRequestError
from quire.server.protocol import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields):
    return ChatCompletionRequest.model_validate({"messages": MESSAGES} | fields)


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "hello"} | fields)


def mistake(make, **fields):
    """The InvalidRequestError inside pydantic's own."""
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    (found,) = caught.value.errors()
    return found["ctx"]["error"]


def test_defaults_are_openais():
    assert completion().to_sampling_params() == SamplingParams(max_tokens=16)
    assert chat().to_sampling_params() == SamplingParams(max_tokens=None)


def test_every_field_arrives_in_the_sampling_params():
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "seed": 5,
        "stop": ["a", "b"],
        "top_k": 7,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "max_tokens": 30,
    }
    wish = SamplingParams(**fields, logprobs=3, logit_bias={4: 1.5})
    body = completion(**fields, logprobs=3, logit_bias={"4": 1.5})
    assert body.to_sampling_params() == wish
    talk = chat(**fields, logprobs=True, top_logprobs=3, logit_bias={"4": 1.5})
    assert talk.to_sampling_params() == wish


def test_null_means_left_out():
    body = completion(n=None, temperature=None, stream=None, echo=None, priority=None, tools=None)
    assert body == completion()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_a_prompt_in_any_of_its_forms_is_a_list(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


def test_logprobs_of_the_prompt_are_asked_for_where_they_are_echoed():
    def asked(**fields):
        return completion(**fields).to_sampling_params().prompt_logprobs

    assert asked(logprobs=2) is None
    assert asked(echo=True) is None
    assert asked(logprobs=2, echo=True) == 2
    assert asked(logprobs=2, echo=True, prompt_logprobs=5) == 5
    assert asked(prompt_logprobs=0) == 0


def test_chat_logprobs_are_a_switch_and_a_count():
    assert chat(logprobs=True).to_sampling_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).to_sampling_params().logprobs == 4
    assert chat(logprobs=False).to_sampling_params().logprobs is None
    with pytest.raises(InvalidRequestError, match="set logprobs to true"):
        chat(top_logprobs=4).to_sampling_params()


def test_both_names_of_the_bound_work_and_exclude_each_other():
    assert chat(max_tokens=4).to_sampling_params().max_tokens == 4
    assert chat(max_completion_tokens=4).to_sampling_params().max_tokens == 4
    with pytest.raises(InvalidRequestError, match="both set"):
        chat(max_tokens=4, max_completion_tokens=4).to_sampling_params()


def test_a_bound_of_zero_is_refused_not_ignored():
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        chat(max_tokens=0).to_sampling_params()
    with pytest.raises(ValidationError, match="max_completion_tokens"):
        chat(max_completion_tokens=0)


@pytest.mark.parametrize("name", sorted(ChatCompletionRequest.not_supported))
def test_what_is_not_supported_yet_is_refused_unless_it_asks_for_nothing(name):
    error = mistake(chat, **{name: {"type": "wanted"}})
    assert error.param == name
    assert str(error) == f"{name} is not supported yet; leave it out"
    for harmless in ChatCompletionRequest.not_supported[name]:
        assert chat(**{name: harmless}) == chat()


def test_an_unknown_field_is_refused_with_the_nearest_known():
    assert str(mistake(completion, max_token=3)).endswith("did you mean max_tokens?")
    assert str(mistake(completion, zzz=3)) == "unknown field 'zzz'; leave it out"


def test_usage_in_a_stream_is_asked_for_in_stream_options():
    assert not completion(stream=True).include_usage
    assert not completion(stream=True, stream_options={}).include_usage
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert mistake(completion, stream_options={}).param == "stream_options"


@pytest.mark.parametrize(
    "fields", [{"n": "2"}, {"n": 2.5}, {"n": True}, {"seed": "x"}, {"ignore_eos": 1}, {"stop": [1]}]
)
def test_types_are_not_guessed(fields):
    with pytest.raises(ValidationError):
        completion(**fields)
