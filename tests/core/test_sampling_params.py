"""Every field of SamplingParams: what it takes, what it refuses, and with which words."""

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.sampling_checks import MAX_STOP_STRINGS
from quire.core.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_BRANCHES,
    SEED_LIMIT,
    BeamSearchParams,
    DecodingParams,
    ModelLimits,
    RequestOutputKind,
    SamplingDefaults,
    SamplingParams,
    resolve,
    sampling_params_of,
)
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError

HUGE = 10**400
LIMITS = ModelLimits(vocab_size=100, max_model_len=64, end_token_ids=(0, 5))

NUMBER_FIELDS: dict[str, tuple[list[Any], list[Any], str]] = {
    # name: (accepted, refused for their bound, the bound in words)
    "temperature": (
        [0, 0.0, 1, 0.7, 100.0, None],
        [-0.1, 100.5, HUGE],
        "at least 0 and at most 100",
    ),
    "top_p": ([0, 0.0, 1, 1.0, None], [-0.01, -1, 1.01], "at least 0 and at most 1"),
    "min_p": ([0, 0.5, 1, None], [-0.01, 1.5], "at least 0 and at most 1"),
    "presence_penalty": ([-2, 0, 2.0], [-2.1, 2.1], "at least -2 and at most 2"),
    "frequency_penalty": ([-2, 0, 2.0], [-2.1, 2.1, -HUGE], "at least -2 and at most 2"),
    "repetition_penalty": ([0.01, 1, 100, None], [0, 5e-324, 101], "at least 0.01 and at most 100"),
}
WHOLE_FIELDS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, MAX_BRANCHES], [0, -1, MAX_BRANCHES + 1], f"at least 1 and at most {MAX_BRANCHES}"),
    "top_k": ([-1, 0, 1, HUGE, None], [-2], "at least -1"),
    "seed": (
        [0, -(2**63), SEED_LIMIT - 1, None],
        [SEED_LIMIT, -(2**63) - 1],
        f"at least {-(2**63)} and at most {SEED_LIMIT - 1}",
    ),
    "max_tokens": ([1, 2**31 - 1, None], [0, -1, 2**31, HUGE], "at least 1 and at most 2147483647"),
    "min_tokens": ([0, 16], [-1, 2**31], "at least 0 and at most 2147483647"),
    "logprobs": ([0, 20, -1, None], [-2], "at least -1"),
    "prompt_logprobs": ([0, 20, -1, None], [-2], "at least -1"),
    "truncate_prompt_tokens": ([1, -1, None], [-2, 2**31], "at least -1 and at most 2147483647"),
}
BEAM_NUMBERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "beam_width": (
        [1, MAX_BEAM_WIDTH],
        [0, -1, MAX_BEAM_WIDTH + 1],
        f"at least 1 and at most {MAX_BEAM_WIDTH}",
    ),
    "max_tokens": ([1, 2**31 - 1, None], [0, -1, 2**31, HUGE], "at least 1 and at most 2147483647"),
    "length_penalty": ([-5, 0, 0.5, 5.0], [-5.1, 6, HUGE], "at least -5 and at most 5"),
    "temperature": ([0, 0.7, 100], [-0.1, 100.5], "at least 0 and at most 100"),
}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
OBJECTS = {"structured_outputs": StructuredOutputsParams, "output_kind": RequestOutputKind}
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias")
LISTS += ("logprob_token_ids",)
CHOICES = {"truncation_side": ("left", "right", None)}
ALL_NUMBERS = {**NUMBER_FIELDS, **WHOLE_FIELDS}


def cases(index: int) -> list[tuple[str, Any]]:
    return [(name, value) for name, entry in ALL_NUMBERS.items() for value in entry[index]]


def refusal(field: str, value: Any) -> str:
    """The message with which a value is refused; it names the field, as does `param`."""
    with pytest.raises(InvalidRequestError, match=f"^{field} ") as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert (caught.value.param, caught.value.http_status) == (field, 400)
    return str(caught.value)


def test_every_field_is_in_these_tables() -> None:
    named = {*ALL_NUMBERS, *FLAGS, *LISTS, *OBJECTS, *CHOICES}
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("field", "value"), cases(0))
def test_values_within_their_bounds_are_kept(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), cases(1))
def test_values_out_of_bounds_are_refused_with_value_and_bound(field: str, value: Any) -> None:
    assert refusal(field, value) == f"{field} is {value}, but must be {ALL_NUMBERS[field][2]}"


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(field: str, value: float) -> None:
    assert refusal(field, value) == f"{field} is {value}, but must be {NUMBER_FIELDS[field][2]}"


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", ["1", True, [0.5], 1j])
def test_values_that_are_no_numbers_are_refused(field: str, value: Any) -> None:
    assert refusal(field, value) == f"{field} is {value!r}, but must be a number"


@pytest.mark.parametrize("field", WHOLE_FIELDS)
@pytest.mark.parametrize("value", ["1", True, 1.0, [1]])
def test_values_that_are_no_whole_numbers_are_refused(field: str, value: Any) -> None:
    assert refusal(field, value) == f"{field} is {value!r}, but must be a whole number"


@pytest.mark.parametrize("field", ["n", "presence_penalty", "frequency_penalty", "min_tokens"])
def test_none_is_refused_where_it_means_nothing(field: str) -> None:
    assert refusal(field, None) == f"{field} is None, but must be a number"


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [None, 0, 1, "yes"])
def test_flags_are_true_or_false(field: str, value: Any) -> None:
    assert refusal(field, value) == f"{field} is {value!r}, but must be True or False"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", 3, "stop is 3, but must be a list of strings"),
        ("stop", ["a", ""], "stop contains '', but each must be a non-empty string"),
        ("stop", "", "stop contains '', but each must be a non-empty string"),
        ("stop", [b"a"], "stop contains b'a', but each must be a non-empty string"),
        ("stop", ["a"] * 65, f"stop has 65 strings, above the bound of {MAX_STOP_STRINGS}"),
        ("bad_words", "word", "bad_words is 'word', but must be a list of strings"),
        ("bad_words", [1], "bad_words contains 1, but each must be a non-empty string"),
        ("stop_token_ids", 5, "stop_token_ids is 5, but must be a list of token ids"),
        ("stop_token_ids", "5", "stop_token_ids is '5', but must be a list of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids contains -1, but each must be a token id"),
        ("stop_token_ids", [True], "stop_token_ids contains True, but each must be a token id"),
        ("stop_token_ids", [1.0], "stop_token_ids contains 1.0, but each must be a token id"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", [None], "allowed_token_ids contains None"),
        ("allowed_token_ids", 7, "allowed_token_ids is 7, but must be a list of token ids"),
        ("logprob_token_ids", [], "logprob_token_ids has 0 tokens, but must have from 1 to 128"),
        ("logprob_token_ids", [1] * 129, "logprob_token_ids has 129 tokens"),
        ("logprob_token_ids", ["a"], "logprob_token_ids contains 'a'"),
        ("truncation_side", "up", "truncation_side is 'up', but must be 'left' or 'right'"),
        ("truncation_side", 1, "truncation_side is 1, but must be"),
        ("logit_bias", [1], "logit_bias is [1], but must map token ids to numbers"),
        ("logit_bias", {"1": 1.0}, "logit_bias has the key '1', but keys must be token ids"),
        ("logit_bias", {-1: 1.0}, "logit_bias has the key -1, but keys must be token ids"),
        ("logit_bias", {1: 101}, "logit_bias is 101, but must be at least -100 and at most 100"),
        ("logit_bias", {1: "x"}, "logit_bias is 'x', but must be a number"),
        ("logit_bias", {1: math.nan}, "logit_bias is nan, but must be at least -100"),
        ("logit_bias", {1: None}, "logit_bias of token 1 is None, but must be a number"),
    ],
)
def test_lists_are_checked_element_by_element(field: str, value: Any, message: str) -> None:
    assert refusal(field, value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("stop", None, ()),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("bad_words", None, ()),
        ("bad_words", ("a",), ("a",)),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", range(3), (0, 1, 2)),
        ("allowed_token_ids", None, None),
        ("allowed_token_ids", [4, 2], (4, 2)),
        ("logprob_token_ids", None, None),
        ("logprob_token_ids", [4, 4, 2], (4, 4, 2)),
        *(("truncation_side", side, side) for side in CHOICES["truncation_side"]),
        ("logit_bias", None, {}),
        ("logit_bias", {3: -100, 4: 0.5}, {3: -100, 4: 0.5}),
    ],
)
def test_lists_are_normalised(field: str, value: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == kept


def test_the_callers_lists_are_copied() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2] = 3.0
    stop.append("b")
    assert (params.logit_bias, params.stop) == ({1: 2.0}, ("a",))


def test_listed_tokens_stand_in_place_of_the_likeliest() -> None:
    params = SamplingParams(logprob_token_ids=[7, 3, 7], logprobs=3)
    decoding = resolve(params, LIMITS, num_prompt_tokens=1, seed=0)
    assert (decoding.logprobs, decoding.logprob_token_ids) == (0, (7, 3))
    assert params.wants_logprobs and SamplingParams(logprobs=0).wants_logprobs
    assert not SamplingParams().wants_logprobs
    with pytest.raises(InvalidRequestError, match="logprobs is 2, but logprob_token_ids has 1"):
        SamplingParams(logprob_token_ids=[7], logprobs=2)
    with pytest.raises(InvalidRequestError, match="contains 100, beyond the vocabulary of 100"):
        wide = SamplingParams(logprob_token_ids=[100])
        resolve(wide, LIMITS, num_prompt_tokens=1, seed=0)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens, 4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize("field", OBJECTS)
def test_values_of_another_class_are_refused(field: str) -> None:
    assert refusal(field, "json") == f"{field} is 'json', but must be a {OBJECTS[field].__name__}"


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize is False; use stop_token_ids"):
        SamplingParams(stop="a", detokenize=False)


def test_truncation_to_zero_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 0, which leaves no"):
        SamplingParams(truncate_prompt_tokens=0)


def test_options_may_be_copied_and_replaced() -> None:
    params = SamplingParams(n=2, stop=["a"])
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
    assert dataclasses.replace(params, n=3).n == 3


def test_min_tokens_that_the_context_has_no_room_for_are_refused() -> None:
    assert resolved(prompt=60, max_tokens=100, min_tokens=4).min_tokens == 4
    with pytest.raises(
        InvalidRequestError, match=r"min_tokens is 5, .* leaves room for 4"
    ) as caught:
        resolved(prompt=60, max_tokens=100, min_tokens=5)
    assert caught.value.param == "min_tokens"


# ---- resolve ------------------------------------------------------------------------------------


def resolved(limits: ModelLimits = LIMITS, prompt: int = 10, **wish: Any) -> DecodingParams:
    return resolve(SamplingParams(**wish), limits, num_prompt_tokens=prompt, seed=77)


def test_options_left_out_get_the_plain_values() -> None:
    assert resolved() == DecodingParams(max_tokens=16, seed=77, end_token_ids=(0, 5))


@pytest.mark.parametrize(
    ("wish", "field", "value"),
    [
        ({"max_tokens": None}, "max_tokens", 54),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5000}, "max_tokens", 5000),
        ({"seed": 3}, "seed", 3),
        ({"seed": -1}, "seed", SEED_LIMIT - 1),
        ({"seed": 0}, "seed", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 99}, "top_k", 99),
        ({"top_k": 100}, "top_k", 0),
        ({"ignore_eos": True}, "end_token_ids", ()),
        ({"stop_token_ids": [7]}, "stop_token_ids", (7,)),
        ({"temperature": 0}, "temperature", 0),
        ({"logit_bias": {3: 1.5}}, "logit_bias", ((3, 1.5),)),
        ({"allowed_token_ids": [3]}, "allowed_token_ids", (3,)),
        ({"logprobs": 20}, "logprobs", 20),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"min_tokens": 4}, "min_tokens", 4),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": -0.5}, "frequency_penalty", -0.5),
    ],
)
def test_each_option_resolves_to_its_decoding_parameter(
    wish: dict[str, Any], field: str, value: Any
) -> None:
    assert getattr(resolved(**wish), field) == value


def test_the_whole_vocabulary_has_log_probabilities_where_the_bound_allows_it() -> None:
    limits = dataclasses.replace(LIMITS, max_logprobs=100)
    params = resolved(limits, logprobs=-1, prompt_logprobs=-1)
    assert (params.logprobs, params.prompt_logprobs) == (100, 100)


def test_a_full_prompt_still_resolves_to_one_token() -> None:
    assert resolved(prompt=64, max_tokens=None).max_tokens == 1


@pytest.mark.parametrize("temperature", [None, 0.0, 1.5])
def test_a_top_p_of_0_is_greedy(temperature: float | None) -> None:
    for given, defaults in ((0.0, SamplingDefaults()), (None, SamplingDefaults(top_p=0.0))):
        limits = dataclasses.replace(LIMITS, defaults=defaults)
        params = resolved(limits, top_p=given, temperature=temperature)
        assert (params.temperature, params.top_p) == (0.0, 1.0)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_the_models_defaults_count_only_where_the_caller_set_none(field: str) -> None:
    defaults = SamplingDefaults(0.6, 0.9, 7, 0.1, 1.2)
    limits = dataclasses.replace(LIMITS, defaults=defaults)
    assert getattr(resolved(limits), field) == getattr(defaults, field)
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert getattr(resolved(limits, **{field: own[field]}), field) == own[field]


def test_bad_words_arrive_as_token_ids() -> None:
    params = resolve(
        SamplingParams(), LIMITS, num_prompt_tokens=1, seed=0, bad_words=[[1, 2], (3,)]
    )
    assert params.bad_words == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"stop_token_ids": [99, 100]},
            "stop_token_ids contains 100, beyond the vocabulary of 100",
        ),
        ({"allowed_token_ids": [100]}, "allowed_token_ids contains 100, beyond the vocabulary"),
        ({"logit_bias": {2000: 1.0}}, "logit_bias contains 2000, beyond the vocabulary"),
        ({"logprobs": 21}, "logprobs is 21, above the bound of 20"),
        ({"logprobs": -1}, "logprobs is 100 (the whole vocabulary), above the bound of 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21, above the bound of 20"),
    ],
)
def test_values_beyond_the_models_limits_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as caught:
        resolved(**wish)
    assert caught.value.param == next(iter(wish))


def resolve_beams(beams: BeamSearchParams, limits: ModelLimits, seed: int) -> DecodingParams:
    params = sampling_params_of(beams)
    return resolve(params, limits, num_prompt_tokens=10, seed=seed, beams=beams)


def make_beams(name: str, value: Any) -> BeamSearchParams:
    fields: dict[str, Any] = {"beam_width": 2, name: value}
    return BeamSearchParams(**fields)


@pytest.mark.parametrize("name", BEAM_NUMBERS)
def test_numbers_of_a_beam_search_have_bounds(name: str) -> None:
    accepted, refused, bound = BEAM_NUMBERS[name]
    for value in accepted:
        assert getattr(make_beams(name, value), name) == value
    for value in refused:
        with pytest.raises(InvalidRequestError, match=f"{name} is .* but must be {bound}"):
            make_beams(name, value)
    for value in ("1", True, [1], math.nan, *([] if None in accepted else [None])):
        with pytest.raises(InvalidRequestError, match=f"{name} is") as caught:
            make_beams(name, value)
        assert caught.value.param == name


def test_a_beam_search_is_refused_flags_that_are_none() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos is 1, but must be True or False"):
        make_beams("ignore_eos", 1)


def test_a_beam_search_resolves_to_its_width_and_nothing_that_samples() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.2)
    limits = dataclasses.replace(LIMITS, defaults=defaults)
    beams = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=2, temperature=0.5)
    params = resolve_beams(beams, limits, seed=4)
    assert params == DecodingParams(
        max_tokens=7,
        temperature=0.5,
        seed=4,
        end_token_ids=LIMITS.end_token_ids,
        beam_width=3,
        length_penalty=2.0,
    )
    assert params.num_beam_candidates == 3 + len(LIMITS.end_token_ids)
    assert sampling_params_of(beams).n == 3


def test_a_beam_search_may_go_to_the_end_and_past_end_tokens() -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True)
    params = resolve_beams(beams, LIMITS, seed=0)
    assert params.max_tokens == LIMITS.max_model_len - 10
    assert params.end_token_ids == ()
    assert params.temperature == 0.0


def test_a_sample_searches_no_beams() -> None:
    params = resolve(SamplingParams(n=3), LIMITS, num_prompt_tokens=1, seed=0)
    assert (params.beam_width, params.length_penalty) == (0, 1.0)


ARRAYS = [np.array([3, 5]), np.array([3, 5], dtype=np.uint8), torch.tensor([3, 5])]
LISTS_OF_SCALARS = [[np.int64(3), np.uint8(5)], (3, torch.tensor(5)), [np.array(3), 5]]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("given", [*ARRAYS, *LISTS_OF_SCALARS], ids=repr)
def test_token_ids_may_be_of_other_types_of_whole_numbers(field: str, given: Any) -> None:
    taken = getattr(SamplingParams(**{field: given}), field)
    assert taken == (3, 5) and set(map(type, taken)) == {int}


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize(
    "given",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([[1]]),
        np.array(1),
        torch.tensor([1.5]),
        torch.tensor([True]),
        [np.bool_(True)],
        [torch.tensor(True)],
        [np.float64(1)],
        np.array([-1]),
        b"ab",
    ],
    ids=repr,
)
def test_arrays_of_other_numbers_are_no_token_ids(field: str, given: Any) -> None:
    refusal(field, given)


def test_numbers_may_be_of_other_types() -> None:
    params = SamplingParams(
        n=np.int64(2),
        max_tokens=torch.tensor(7),
        temperature=np.float32(0.5),
        min_p=np.float64(0.25),
        logit_bias={np.int32(4): np.float64(1.5)},
    )
    assert params == SamplingParams(
        n=2, max_tokens=7, temperature=0.5, min_p=0.25, logit_bias={4: 1.5}
    )
    values = [params.n, params.max_tokens, params.temperature, params.min_p]
    assert [type(value) for value in values] == [int, int, float, float]
    assert [(type(k), type(v)) for k, v in params.logit_bias.items()] == [(int, float)]
    assert type(BeamSearchParams(beam_width=np.int8(2)).beam_width) is int
    for value in (np.float32(1), np.bool_(True), torch.tensor(True), "1"):
        refusal("n", value)
    for value in (np.bool_(True), torch.tensor([1.0]), np.float32("nan")):
        refusal("temperature", value)


@pytest.mark.parametrize(("field", "value"), [("stop", "a\udc00"), ("bad_words", ["\udc00"])])
def test_a_text_that_can_not_be_encoded_is_refused(field: str, value: Any) -> None:
    assert "U+DC00 at position" in refusal(field, value)


def test_the_refusal_of_a_long_value_is_short() -> None:
    """The server makes the message on its event loop."""
    for wrong in ({"logit_bias": {1: [1] * 10_000}}, {"temperature": "x" * 10_000}):
        with pytest.raises(InvalidRequestError, match="must be a number") as refused:
            SamplingParams(**wrong)
        assert len(str(refused.value)) < 200
