"""What a client gets of what a step sampled."""

import pytest
from tests.core.test_sequence import make

from quire.core.request import FinishReason
from quire.core.scheduling.step_results import extend, failure
from quire.core.step import TokenLogprobs

ENTRY = TokenLogprobs(1, -1.0, 1, (), ())


def test_tokens_are_added_and_reported() -> None:
    sequence = make()
    sequence.num_cached_tokens = 2
    output = extend(sequence, [5, 6], None)
    assert (output.request_id, output.branch_index, output.token_ids) == ("r", 0, [5, 6])
    assert (output.num_cached_tokens, output.finish_reason, output.logprobs) == (2, None, None)
    assert sequence.token_ids == [10, 11, 12, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "taken", "reason", "stop_reason"),
    [
        ([1, 2, 7, 3], [1, 2, 7], FinishReason.STOP, None),
        ([1, 9, 7], [1, 9], FinishReason.STOP, 9),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], FinishReason.LENGTH, None),
        ([1, 2, 3, 9], [1, 2, 3, 9], FinishReason.STOP, 9),
    ],
)
def test_it_ends_with_the_first_end_among_them(
    tokens: list[int], taken: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    sequence = make(3, end_token_ids=(7,), stop_token_ids=(9,))
    output = extend(sequence, tokens, [ENTRY] * len(tokens))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        taken,
        reason,
        stop_reason,
    )
    assert output.logprobs == [ENTRY] * len(taken)
    assert sequence.token_ids[3:] == taken


def test_log_probabilities_of_the_prompt_come_once_with_the_first_token() -> None:
    sequence = make(3, prompt_logprobs=0)
    sequence.prompt_logprobs = [ENTRY, ENTRY]
    assert extend(sequence, [1], None).prompt_logprobs == (ENTRY, ENTRY)
    assert extend(sequence, [1], None).prompt_logprobs is None
    assert extend(make(), [1], None).prompt_logprobs is None


@pytest.mark.parametrize(("given", "index"), [(None, 0), (3, 3), (0, 0)])
def test_a_failure_says_what_went_wrong(given: int | None, index: int) -> None:
    output = failure(make(), "NaN", given)
    assert (output.branch_index, output.token_ids, output.error) == (index, (), "NaN")
    assert output.finish_reason is FinishReason.ERROR
