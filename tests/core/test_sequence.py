"""A sequence's transitions, its counts and how it ends."""

import pytest

from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import (
    LEGAL_TRANSITIONS,
    Sequence,
    SequenceState,
    find_plain_end,
    make_sequences,
)
from quire.core.step import TokenLogprobs

WAITING, RUNNING = SequenceState.WAITING, SequenceState.RUNNING
PREEMPTED, FINISHED = SequenceState.PREEMPTED, SequenceState.FINISHED

LEGAL = {
    (WAITING, RUNNING),
    (WAITING, PREEMPTED),  # a new beam that shares its parent's blocks and finds no row
    (WAITING, FINISHED),
    (RUNNING, PREEMPTED),
    (RUNNING, FINISHED),
    (PREEMPTED, RUNNING),
    (PREEMPTED, FINISHED),
}


def make(prompt: int = 3, max_num_tokens: int | None = None, **params: object) -> Sequence:
    decoding = DecodingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    return Sequence("r", list(range(10, 10 + prompt)), decoding, max_num_tokens=max_num_tokens)


@pytest.mark.parametrize("before", list(SequenceState))
@pytest.mark.parametrize("after", list(SequenceState))
def test_the_table_of_transitions(before: SequenceState, after: SequenceState) -> None:
    sequence = make()
    sequence.state = before
    if (before, after) in LEGAL:
        sequence.move_to(after)
        assert sequence.state is after
    else:
        with pytest.raises(AssertionError, match=rf"r/0 {before.value}.*become {after.value}"):
            sequence.move_to(after)
        assert sequence.state is before


def test_tokens_are_plain_up_to_the_end_of_the_slots_or_before_the_last_tokens() -> None:
    sequence = make(prompt=3, max_tokens=4)
    for num_slots, expected in ((4, 4), (5, 5), (8, 5)):
        sequence.num_slots = num_slots
        assert find_plain_end(sequence) == expected
    sequence.shares_tail = True
    assert find_plain_end(sequence) == 0
    for params in ({"prompt_logprobs": 0}, {"beam_width": 2}):
        sequence = make(**params)
        sequence.num_slots = 4
        assert find_plain_end(sequence) == 0


def test_every_state_is_in_the_table() -> None:
    assert set(LEGAL_TRANSITIONS) == set(SequenceState)


def test_a_new_sequence_waits_with_nothing() -> None:
    sequence = make()
    assert sequence.state is WAITING and not sequence.is_finished
    assert (sequence.row, sequence.block_tables, sequence.num_slots) == (None, (), 0)
    assert (sequence.num_tokens, sequence.num_output_tokens) == (3, 0)


@pytest.mark.parametrize(
    ("max_tokens", "max_num_tokens", "expected"), [(4, None, 7), (4, 100, 7), (4, 5, 5), (1, 7, 4)]
)
def test_max_num_tokens_is_limited_by_both_bounds(
    max_tokens: int, max_num_tokens: int | None, expected: int
) -> None:
    assert make(3, max_num_tokens, max_tokens=max_tokens).max_num_tokens == expected


def test_pending_tokens_count_as_tokens_but_not_as_output() -> None:
    sequence = make()
    sequence.num_pending_tokens = 2
    assert (sequence.num_tokens, sequence.num_output_tokens) == (5, 0)


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({}, [1, 2, 3, 4], FinishReason.LENGTH),
        ({}, [1, 2, 3], None),
        ({"end_token_ids": (2,)}, [1, 2], FinishReason.STOP),
        ({"stop_token_ids": (9,), "end_token_ids": (2,)}, [1, 9], FinishReason.STOP),
        ({"end_token_ids": (2,), "min_tokens": 3}, [1, 2], None),
        ({"end_token_ids": (2,), "min_tokens": 3}, [2, 2, 2], FinishReason.STOP),
        ({"end_token_ids": (2,), "min_tokens": 2}, [1, 2], FinishReason.STOP),
        ({"end_token_ids": (4,)}, [1, 2, 3, 4], FinishReason.STOP),  # both: the end token counts
        ({"end_token_ids": (10,)}, [1, 2], None),  # in the prompt only
    ],
)
def test_how_it_ends(
    params: dict[str, object], tokens: list[int], reason: FinishReason | None
) -> None:
    sequence = make(**params)
    ended = [sequence.append(token_id) for token_id in tokens]
    assert sequence.finish_reason is reason
    assert ended == [False] * (len(tokens) - 1) + [reason is not None]
    assert sequence.token_ids == [10, 11, 12, *tokens]
    assert sequence.state is WAITING, "the scheduler owns the state"


def test_it_ends_at_the_models_length() -> None:
    sequence = make(3, max_num_tokens=5, max_tokens=100)
    assert [sequence.append(1), sequence.append(1)] == [False, True]
    assert sequence.finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_are_needed_until_all_but_the_first_position_are_there() -> None:
    assert not make().needs_prompt_logprobs
    assert not make(1, prompt_logprobs=0).needs_prompt_logprobs
    sequence = make(3, prompt_logprobs=0)
    entry = TokenLogprobs(1, -1.0, 1, (), ())
    needs = []
    for _ in range(3):
        needs.append(sequence.needs_prompt_logprobs)
        sequence.prompt_logprobs.append(entry)
    assert needs == [True, True, False]


def test_repr_shows_id_state_row_and_progress() -> None:
    sequence = make()
    sequence.num_computed_tokens = 2
    assert repr(sequence) == "<Sequence r/0 waiting row=None computed=2/3>"


def test_a_branch_has_the_tokens_the_limits_and_the_hashes_of_its_parent() -> None:
    parent = make(3, max_num_tokens=9, max_tokens=100)
    parent.tenant, parent.deadline_s, parent.priority = "t", 5.0, 2
    parent.chain.append(b"first")
    for token_id in (1, 2):
        parent.append(token_id)
    parent.num_pending_tokens = 1
    child = parent.branch(4, DecodingParams(3))
    assert (child.request_id, child.branch_index, child.state) == ("r", 4, WAITING)
    assert (child.token_ids, child.num_prompt_tokens) == ([10, 11, 12, 1, 2], 3)
    assert (child.num_output_tokens, child.num_pending_tokens) == (2, 0)
    assert child.max_num_tokens == 6, "as if it had generated all of them itself"
    assert child.branch(5, DecodingParams(100)).max_num_tokens == 9, "the model's limit, not that"
    assert (child.tenant, child.deadline_s, child.priority) == ("t", 5.0, 2)
    child.append(9)
    child.chain.append(b"second")
    assert (parent.token_ids[-1], parent.chain) == (2, [b"first"]), "nothing is shared"


def test_a_fork_waits_for_its_parent_until_it_leaves_it() -> None:
    parent = make()
    children = [parent.branch(index, parent.params) for index in (1, 2)]
    for child in children:
        child.fork_from(parent)
    assert parent.forks == children
    assert [child.num_common_tokens for child in children] == [3, 3]
    children[0].stop_waiting_for_fork()
    children[0].stop_waiting_for_fork()
    assert (parent.forks, children[0].parent) == ([children[1]], None)


def test_a_beam_is_known_by_its_parameters() -> None:
    assert make(beam_width=2).is_beam and not make().is_beam


def test_tokens_generated_before_a_resumption_count_as_output() -> None:
    params = DecodingParams(4, end_token_ids=(2,), min_tokens=3)
    sequence = Sequence("r", (10, 11, 12), params, output_token_ids=(1, 1))
    assert (sequence.token_ids, sequence.num_prompt_tokens) == ([10, 11, 12, 1, 1], 3)
    assert (sequence.num_output_tokens, sequence.max_num_tokens) == (2, 7)
    assert sequence.append(2), "the third token may be an end"
    assert sequence.finish_reason is FinishReason.STOP


def test_the_sequences_of_a_request_are_equal_but_for_their_index() -> None:
    request = Request("r", [1, 2], DecodingParams(5), n=3, priority=4, tenant="t", deadline_s=1.5)
    (group,) = make_sequences(request, 100, b"root", now_s=10.0)
    assert [sequence.branch_index for sequence in group] == [0, 1, 2]
    for sequence in group:
        assert (sequence.request_id, sequence.token_ids, sequence.chain_root) == (
            "r",
            [1, 2],
            b"root",
        )
        assert (sequence.priority, sequence.tenant, sequence.deadline_s) == (4, "t", 11.5)
    group[0].append(7)
    assert group[1].token_ids == [1, 2] == request.prompt_token_ids, "nothing is shared"


def test_a_beam_search_begins_with_one_sequence() -> None:
    request = Request("r", [1, 2], DecodingParams(5, beam_width=4), n=4)
    ((leader,),) = make_sequences(request, 100, b"", 0.0)
    assert leader.is_beam and leader.deadline_s is None


def test_resumed_branches_come_in_groups_of_equal_tokens() -> None:
    resumed = tuple(
        ResumedBranch(index, ids) for index, ids in [(1, (5,)), (2, ()), (4, (5, 6)), (6, (5,))]
    )
    request = Request("r", [1, 2], DecodingParams(9), n=8, resumed=resumed)
    groups = make_sequences(request, 100, b"", 0.0)
    assert [[sequence.branch_index for sequence in group] for group in groups] == [[1, 6], [2], [4]]
    assert [group[0].token_ids for group in groups] == [[1, 2, 5], [1, 2], [1, 2, 5, 6]]
    assert all(sequence.num_prompt_tokens == 2 for group in groups for sequence in group)
