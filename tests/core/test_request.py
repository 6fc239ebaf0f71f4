"""Which prompts are refused, in what order, and how long a look at one takes."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import pytest

from quire.core.request import (
    Request,
    ResumedBranch,
    check_prediction,
    check_prompt,
    check_resumed,
)
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.errors import InvalidRequestError, PromptTooLongError

LIMITS = ModelLimits(vocab_size=100, max_model_len=10)


class Token(IntEnum):
    HELLO = 7


@pytest.mark.parametrize("prompt", [[0], [99] * 9, (1, 2), range(5), [Token.HELLO, 3]])
def test_good_prompts(prompt: Sequence[int]) -> None:
    check_prompt(prompt, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, True], "contains True, but token ids are whole numbers"),
        ([Token.HELLO, 2.0], "contains 2.0, but token ids are whole numbers"),
        ([1, "2", None], "contains '2', but token ids are whole numbers"),
        ([5, -1], r"token id -1, but the vocabulary has 100 tokens \(0 to 99\)"),
        ([5, 100], "token id 100, but the vocabulary has 100"),
    ],
)
def test_bad_prompts(prompt: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_prompt(prompt, LIMITS)
    assert caught.value.param == "prompt"
    assert not isinstance(caught.value, PromptTooLongError)


class Unread(Sequence[int]):
    """A prompt that must not be looked at."""

    def __len__(self) -> int:
        return 8_000_000

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an id was read")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the ids were read")


def test_a_prompt_that_is_too_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(PromptTooLongError, match="has 8000000 tokens, but max_model_len is 10"):
        check_prompt(Unread(), LIMITS)
    check_prompt([1] * 9, LIMITS)
    with pytest.raises(PromptTooLongError):
        check_prompt([1] * 10, LIMITS)


def test_a_long_prompt_takes_milliseconds() -> None:
    limits = ModelLimits(vocab_size=100_000, max_model_len=200_000)
    prompt = list(range(100_000))
    start = time.process_time()
    for _ in range(5):
        check_prompt(prompt, limits)
    assert (time.process_time() - start) / 5 < 0.03  # about 3 ms; ten times that is a mistake


# ---- resumed -----------------------------------------------------------------------------------

PARAMS = DecodingParams(5, prompt_logprobs=2)
REQUEST = Request("r", [1, 2, 3], PARAMS, n=3, deadline_s=10.0)


def test_a_request_that_brought_nothing_begins_anew_with_less_time() -> None:
    again = REQUEST.resume({0: [], 1: [], 2: []}, has_output=False, elapsed_s=4.0)
    assert again == dataclasses.replace(REQUEST, deadline_s=6.0)
    late = REQUEST.resume({0: [], 1: [], 2: []}, has_output=False, elapsed_s=40.0)
    assert late.deadline_s == 0.0


def test_open_branches_go_on_and_the_log_probabilities_of_the_prompt_do_not_come_again() -> None:
    again = REQUEST.resume({2: [7, 8], 0: []}, has_output=True, elapsed_s=0.0)
    assert again.resumed == (ResumedBranch(2, (7, 8)), ResumedBranch(0, ()))
    assert again.params == dataclasses.replace(PARAMS, prompt_logprobs=None)
    assert (again.request_id, again.prompt_token_ids, again.n) == ("r", [1, 2, 3], 3)


def test_a_resumed_request_keeps_its_prediction() -> None:
    request = dataclasses.replace(REQUEST, prediction_token_ids=(4, 5))
    again = request.resume({0: [4]}, has_output=True, elapsed_s=0.0)
    assert again.prediction_token_ids == (4, 5)


@pytest.mark.parametrize("token_ids", [(), (0,), tuple(range(90, 100))])
def test_good_predictions(token_ids: tuple[int, ...]) -> None:
    check_prediction(token_ids, LIMITS)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((1,) * 11, "the prediction has 11 tokens, above max_model_len, 10"),
        ((1, -1), r"the prediction contains token id -1, but the vocabulary has 100 tokens"),
        ((100, 3), r"the prediction contains token id 100, but the vocabulary has 100 tokens"),
    ],
)
def test_bad_predictions(token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_prediction(token_ids, LIMITS)
    assert caught.value.param == "prediction"


def test_a_branch_that_was_given_up_before_anything_came_is_not_begun_again() -> None:
    again = REQUEST.resume({0: [], 2: []}, has_output=False, elapsed_s=0.0)
    assert again.resumed == (ResumedBranch(0), ResumedBranch(2))
    assert again.params is PARAMS, "the log-probabilities of the prompt are still to come"


def test_a_beam_search_begins_anew() -> None:
    request = Request("r", [1], DecodingParams(5, beam_width=2), n=2)
    assert request.resume({1: []}, has_output=True, elapsed_s=3.0) is request


@pytest.mark.parametrize(
    ("branches", "changes", "message"),
    [
        ([(0, (1,))], {}, None),
        ([(0, (1, 2, 3, 4)), (2, ())], {}, None),
        ([(0, (1,)), (0, (2,))], {}, r"branches are \[0, 0\], but must be some of the 3"),
        ([(3, (1,))], {}, r"branches are \[3\]"),
        ([(1, (1, 2, 3, 4, 5))], {}, "branch 1 is to be resumed after 5 tokens, but ends with 5"),
        ([(1, (1, 2))], {"prompt_token_ids": [1] * 8}, "after 2 tokens, but ends with 2"),
        ([(1, (1, 100))], {}, "token id 100"),
        ([(1, ())], {"params": DecodingParams(5, beam_width=3)}, "a beam search can't be resumed"),
    ],
)
def test_only_valid_branches_can_be_resumed(
    branches: list[tuple[int, tuple[int, ...]]], changes: dict[str, Any], message: str | None
) -> None:
    resumed = tuple(ResumedBranch(*branch) for branch in branches)
    request = dataclasses.replace(REQUEST, resumed=resumed, **changes)
    if message is None:
        check_resumed(request, LIMITS)
        return
    with pytest.raises(InvalidRequestError, match=message):
        check_resumed(request, LIMITS)
