"""What of a body is understood, what is refused by name, and what becomes of the rest."""

import pytest
from pydantic import ValidationError

from quire.core.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams, SamplingParams
from quire.errors import InvalidRequestError
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest

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
    assert completion().to_params().sampling == SamplingParams(max_tokens=16)
    assert chat().to_params().sampling == SamplingParams(max_tokens=None)


def test_server_defaults_are_applied_to_every_body():
    defaults = AnswerDefaults(includes_usage=True, names_token_ids=True)
    asked = chat(stream=True, stream_options={"continuous_usage_stats": True})
    plain, contrary = completion(), completion(return_tokens_as_token_ids=False, stream=True)
    for body in (asked, plain, contrary):
        body.adopt(defaults)
    assert asked.include_usage and asked.continuous_usage and asked.return_tokens_as_token_ids
    assert plain.return_tokens_as_token_ids and not plain.include_usage
    assert contrary.include_usage and not contrary.return_tokens_as_token_ids


FIELDS = {
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
    "prompt_logprobs": 4,
    "max_tokens": 30,
}


def test_every_field_arrives_in_the_sampling_params():
    params = SamplingParams(**FIELDS, logprobs=3, logit_bias={4: 1.5})
    body = completion(**FIELDS, logprobs=3, logit_bias={"4": 1.5})
    assert body.to_params().sampling == params
    talk = chat(**FIELDS, logprobs=True, top_logprobs=3, logit_bias={"4": 1.5})
    assert talk.to_params().sampling == params


@pytest.mark.parametrize("make", [chat, completion])
def test_an_extra_body_holds_any_field(make):
    assert make(extra_body=FIELDS) == make(**FIELDS)
    assert make(extra_body={"model": "x", "stream": True}) == make(model="x", stream=True)
    assert mistake(make, n=2, extra_body={"n": 2}).param == "n"


def test_null_means_left_out():
    body = completion(n=None, temperature=None, stream=None, echo=None, priority=None, suffix=None)
    assert body == completion()
    empty = chat(top_logprobs=None, logprobs=None, stop=None, logit_bias=None, tools=None)
    assert empty == chat()


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
def test_every_form_of_prompt_becomes_a_list(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("value", [0.5, "x", None, [1]])
def test_a_list_of_millions_of_mistakes_has_a_few(value):
    """One for each alternative, not one for each element: that would be gigabytes."""
    for make, name in ((completion, "prompt"), (completion, "stop"), (chat, "allowed_token_ids")):
        mixed = [1, [1], "x", 0.5]
        with pytest.raises(ValidationError) as caught:
            make(**{name: [value, *mixed] * 1000})
        assert caught.value.error_count() < 10


def test_logprobs_of_the_prompt_are_asked_for_where_they_are_echoed():
    def asked(**fields):
        return completion(**fields).to_params().sampling.prompt_logprobs

    assert asked(logprobs=2) is None
    assert asked(echo=True) is None
    assert asked(logprobs=2, echo=True) == 2
    assert asked(logprobs=2, echo=True, prompt_logprobs=5) == 5
    assert asked(prompt_logprobs=0) == 0


def test_an_echo_alone_asks_for_a_token_that_is_not_answered():
    scoring = completion(echo=True, max_tokens=0, logprobs=1)
    assert scoring.scores_only
    assert scoring.to_params().sampling == SamplingParams(max_tokens=1, prompt_logprobs=1)
    assert not completion(echo=True, max_tokens=1).scores_only
    assert not completion(max_tokens=0).scores_only
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        completion(max_tokens=0).to_params()
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        completion(max_tokens=0, echo=True, use_beam_search=True).to_params()
    with pytest.raises(InvalidRequestError, match="min_tokens is 1, above max_tokens, 0"):
        completion(max_tokens=0, echo=True, min_tokens=1).to_params()


@pytest.mark.parametrize("make", [chat, completion])
def test_logprobs_of_the_prompt_are_not_streamed(make):
    with pytest.raises(InvalidRequestError, match="can't be streamed") as caught:
        make(prompt_logprobs=1, stream=True).to_params()
    assert caught.value.param == "prompt_logprobs"


def test_chat_logprobs_are_a_switch_and_a_count():
    assert chat(logprobs=True).to_params().sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).to_params().sampling.logprobs == 4
    assert chat(logprobs=False).to_params().sampling.logprobs is None
    with pytest.raises(InvalidRequestError, match="set logprobs to true"):
        chat(top_logprobs=4).to_params()


BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 30}


@pytest.mark.parametrize("make", [chat, completion])
def test_a_beam_search_has_the_width_n(make):
    options = {"length_penalty": -0.5, "temperature": 0.7, "ignore_eos": True}
    beams = BeamSearchParams(beam_width=3, max_tokens=30, **options)
    assert make(**BEAMS, **options).to_params().beams == beams
    narrow = make(use_beam_search=True, max_tokens=30).to_params().beams
    assert narrow == BeamSearchParams(beam_width=1, max_tokens=30)


def test_a_beam_search_is_as_long_as_a_sample_where_nothing_is_said():
    assert completion(use_beam_search=True).to_params().sampling.max_tokens == 16
    assert chat(use_beam_search=True).to_params().sampling.max_tokens is None
    assert chat(use_beam_search=True, max_completion_tokens=7).to_params().sampling.max_tokens == 7


UNUSUAL = {
    "stream": True,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": 0,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "min_tokens": 1,
    "logit_bias": {"3": 1.0},
    "bad_words": ["x"],
    "allowed_token_ids": [3],
    "skip_special_tokens": False,
    "prompt_logprobs": 0,
    "logprob_token_ids": [3],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (completion, UNUSUAL | {"logprobs": 0}),
        (
            chat,
            UNUSUAL
            | {"logprobs": True, "top_logprobs": 0, "tools": [{}]}
            | {"prediction": {"type": "content", "content": "x"}},
        ),
    ],
)
def test_options_not_for_beam_searches_are_refused_by_name(make, options):
    body = make(**BEAMS)
    assert set(options) == set(body.not_for_beams)
    for name, value in options.items():
        asked = {name: value} | ({"logprobs": True} if name == "top_logprobs" else {})
        with pytest.raises(InvalidRequestError, match="use_beam_search does not support") as caught:
            make(**BEAMS, **asked).to_params()
        assert caught.value.param in asked
        for harmless in body.not_for_beams[name]:
            assert make(**BEAMS, **{name: harmless}).to_params() == body.to_params()


def test_a_beam_search_is_asked_for_by_its_switch_and_within_bounds():
    with pytest.raises(InvalidRequestError, match="set it to true") as caught:
        completion(length_penalty=1.0).to_params()
    assert caught.value.param == "length_penalty"
    for width in (0, -1, MAX_BEAM_WIDTH + 1):
        with pytest.raises(InvalidRequestError, match=f"at most {MAX_BEAM_WIDTH}") as caught:
            completion(use_beam_search=True, n=width).to_params()
        assert caught.value.param == "n"
    with pytest.raises(InvalidRequestError, match="length_penalty is 6"):
        completion(**BEAMS, length_penalty=6).to_params()
    with pytest.raises(InvalidRequestError, match="best_of"):
        completion(**BEAMS, best_of=4).to_params()


def test_the_best_of_n_is_n():
    assert completion(n=3, best_of=3).to_params() == completion(n=3).to_params()
    with pytest.raises(InvalidRequestError, match="best of more than n is not supported"):
        completion(n=2, best_of=3).to_params()


def test_both_names_of_the_bound_work_and_exclude_each_other():
    assert chat(max_tokens=4).to_params().sampling.max_tokens == 4
    assert chat(max_completion_tokens=4).to_params().sampling.max_tokens == 4
    with pytest.raises(InvalidRequestError, match="both set"):
        chat(max_tokens=4, max_completion_tokens=4).to_params()


def test_a_bound_of_zero_is_refused_not_ignored():
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        chat(max_tokens=0).to_params()
    with pytest.raises(ValidationError, match="max_completion_tokens"):
        chat(max_completion_tokens=0)


@pytest.mark.parametrize(
    ("make", "name"),
    [(chat, name) for name in sorted(ChatCompletionRequest.not_supported)]
    + [(completion, name) for name in sorted(CompletionRequest.not_supported)],
)
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(make, name):
    error = mistake(make, **{name: {"type": "wanted"}})
    assert error.param == name
    newer = {"functions": "tools", "function_call": "tool_choice"}.get(name)
    assert str(error) == (
        f"{name} is the old form of {newer}; send {newer} instead"
        if newer
        else f"{name} is not supported yet; leave it out"
    )
    for harmless in type(make()).not_supported[name]:
        assert make(**{name: harmless}) == make()


def test_usage_in_a_stream_is_asked_for_in_stream_options():
    assert not completion(stream=True).include_usage
    assert not completion(stream=True, stream_options={}).include_usage
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert mistake(completion, stream_options={}).param == "stream_options"
    continuous = completion(stream=True, stream_options={"continuous_usage_stats": True})
    assert (continuous.continuous_usage, continuous.include_usage) == (True, False)
    assert not completion(stream=True, stream_options={"include_usage": True}).continuous_usage
    assert mistake(chat, stream=True, stream_options={"include_usages": True})


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_deadline_is_a_number_of_seconds_to_come(seconds):
    assert completion(deadline_s=2).deadline_s == completion(deadline_s=2.0).deadline_s == 2
    with pytest.raises(ValidationError, match="deadline_s"):
        completion(deadline_s=seconds)


def test_the_keys_of_a_logit_bias_are_token_ids():
    assert completion(logit_bias={"0": 1, "42": -1.5}).to_params().sampling.logit_bias == {
        0: 1,
        42: -1.5,
    }
    for key in ("x", "-1", "07", "1.0", " 1", "1_0", "", "٣", "9" * 5000):
        with pytest.raises(InvalidRequestError, match="keys must be token ids") as caught:
            completion(logit_bias={key: 1}).to_params()
        assert caught.value.param == "logit_bias"
    for bias in ("1", True, 101, None, [1], float("nan")):
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            completion(logit_bias={"1": bias}).to_params()


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_is_any_integer_of_64_bits(seed):
    assert completion(seed=seed).to_params().sampling.seed == seed
    with pytest.raises(InvalidRequestError, match="seed is"):
        completion(seed=2**64).to_params()


@pytest.mark.parametrize(
    "fields", [{"n": "2"}, {"n": 2.5}, {"n": True}, {"seed": "x"}, {"ignore_eos": 1}, {"stop": [1]}]
)
def test_types_are_not_guessed(fields):
    with pytest.raises(ValidationError):
        completion(**fields)


def test_hints_of_any_value_change_nothing():
    hints = {"metadata": {}, "store": True, "prompt_cache_key": "x", "safety_identifier": "y"}
    hints |= {"service_tier": "flex", "verbosity": "medium", "request_id": "r"}
    assert chat(**hints) == chat()
    assert completion(**hints) == completion()
    assert (
        chat(stream=True, stream_options={"include_obfuscation": True}).stream_options is not None
    )
    assert chat(top_logprobs=0).to_params() == chat().to_params()
    assert completion(early_stopping=False, safe_prompt=False) == completion()
    with pytest.raises(ValidationError, match="safe_prompt is not supported"):
        completion(safe_prompt=True)


def test_mistrals_name_of_the_seed():
    assert completion(random_seed=7).to_params() == completion(seed=7).to_params()
    with pytest.raises(InvalidRequestError, match="both set"):
        completion(random_seed=7, seed=8).to_params()
