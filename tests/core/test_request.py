"""Which prompts are refused, in what order, and how long a look at one takes."""

import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import pytest

from quire.core.request import check_prompt
from quire.core.sampling_params import ModelLimits
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
