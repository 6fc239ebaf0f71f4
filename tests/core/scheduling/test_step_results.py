"""What a result brings the memory: filled blocks and the prompts' log-probabilities."""

from typing import Any

import pytest
from tests.core.harness import make_memory, make_sequence
from tests.core.scheduling.test_plain_rows import decoding
from tests.core.test_sequence import make

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.request import FinishReason
from quire.core.scheduling.plain_rows import NO_PLAIN_ROWS
from quire.core.scheduling.step_results import StepInFlight, extend, failure
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import StepResult, TokenLogprobs
from quire.simulation.fakes.fake_model import fake_logprobs

ENTRIES = [fake_logprobs(1, 2, 1), fake_logprobs(3, 4, 1)]


def running(memory: KVCacheManager) -> Sequence:
    """Of 9 tokens in blocks of 4, in row 3."""
    sequence = make_sequence(memory, range(9), prompt_logprobs=1)
    memory.admit(sequence, memory.match(sequence), 0)
    sequence.move_to(SequenceState.RUNNING)
    sequence.num_admissions, sequence.num_computed_tokens, sequence.row = 1, 9, 3
    return sequence


def take_in(sequence: Sequence, memory: KVCacheManager, **more: Any) -> None:
    step = StepInFlight(0, rows={3: (sequence, 1, 9)}, num_tokens=9, num_sampling=1)
    step.confirm(StepResult(0, (3,), ((5,),), prompt_logprobs={3: ENTRIES}, **more), (), memory)


def test_full_blocks_are_published_and_log_probabilities_kept() -> None:
    memory = make_memory()
    sequence = running(memory)
    take_in(sequence, memory)
    assert sequence.num_confirmed_tokens == 9 and sequence.num_published_blocks == 2
    assert sequence.prompt_logprobs == ENTRIES
    assert len(memory.cache) == 2


@pytest.mark.parametrize("why", ["failed", "ended", "admitted again"])
def test_no_blocks_are_taken_from_sequences_that_changed_since_the_step(why: str) -> None:
    memory = make_memory()
    sequence = running(memory)
    if why == "ended":
        sequence.move_to(SequenceState.FINISHED)
    elif why == "admitted again":
        sequence.num_admissions += 1
    take_in(sequence, memory, **({"failed": {3: "NaN"}} if why == "failed" else {}))
    assert sequence.num_confirmed_tokens == 0 and len(memory.cache) == 0
    assert (sequence.prompt_logprobs == []) is (why != "ended")


def test_a_preempted_one_keeps_log_probabilities_only_with_the_token_that_follows() -> None:
    for num_pending, expected in ((1, ENTRIES), (0, [])):
        memory = make_memory()
        sequence = running(memory)
        sequence.move_to(SequenceState.PREEMPTED)
        sequence.num_pending_tokens = num_pending
        take_in(sequence, memory)
        assert sequence.prompt_logprobs == expected
        assert sequence.num_confirmed_tokens == 0


# ---- outputs ------------------------------------------------------------------------------------


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


def test_rows_that_end_fail_or_were_released_are_no_longer_plain() -> None:
    goes_on, ends, fails, released = (decoding(row, 2) for row in range(4))
    plain = NO_PLAIN_ROWS.changed((), (goes_on, ends, fails, released))
    step = StepInFlight(0, 0, plain, num_sampling=4)
    released.move_to(SequenceState.PREEMPTED)
    released.row = None
    result = StepResult(0, (0, 1, 3), ((7,), (2,), (9,)), failed={2: "NaN"})
    assert step.split(result, num_released=1) == [(7,)]
    assert step.plain.sequences == [goes_on] and plain.rows == [0, 1, 2, 3]
    assert step.rows == {1: (ends, 1, 2), 2: (fails, 1, 3), 3: (released, 1, 4)}
    step.confirm(result, [(7,)], make_memory())
    assert goes_on.token_ids[-1] == 7
    assert ends.num_confirmed_tokens == 2 and fails.num_confirmed_tokens == 2  # as before
