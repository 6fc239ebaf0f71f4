"""Sequences that decode in every step: their shared counts, ends and rows."""

import gc
import weakref
from random import Random

import pytest
from tests.core.test_sequence import make

from quire.core.scheduling.plain_rows import NO_PLAIN_ROWS, PlainRows, PlainSequences
from quire.core.sequence import Sequence, SequenceState


def decoding(row: int, *end_token_ids: int, plain_end: int = 50) -> Sequence:
    """A sequence of 1 + row tokens that decodes in `row`, and has computed all but the last."""
    sequence = make(1 + row, max_tokens=100, end_token_ids=end_token_ids)
    sequence.move_to(SequenceState.RUNNING)
    sequence.row, sequence.num_admissions, sequence.rank = row, 1, (row,)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = row
    sequence.plain_end = plain_end
    return sequence


def test_plain_rows_stay_sorted_and_share_no_column_with_the_rows_before() -> None:
    first, second, third = decoding(5), decoding(2), decoding(3)
    before = NO_PLAIN_ROWS.changed((), (first, second))
    after = before.changed((second,), (third,))
    assert before.rows == [2, 5] and before.sequences == [second, first]
    assert after.rows == [3, 5] and after.sequences == [third, first]
    assert after.token_ids[0] is third.token_ids and not NO_PLAIN_ROWS.rows
    outputs = after.outputs([(7,), (8,)])
    assert [(each.request_id, each.token_ids) for each in outputs] == [
        (third.request_id, (7,)),
        (first.request_id, (8,)),
    ]
    assert all(each.finish_reason is None and each.phases is None for each in outputs)


def test_members_are_due_at_their_ends_and_leave_when_they_have_changed() -> None:
    plain, early, late = PlainSequences(), decoding(1, plain_end=3), decoding(4, plain_end=8)
    plain.renew([late, early])
    assert plain.others([early, late]) == [] and not plain.pop_due()
    for step_id in range(2):
        rows = plain.launch(step_id)
    assert rows.rows == [1, 4] and (early.num_computed_tokens, late.num_computed_tokens) == (3, 6)
    due = plain.pop_due()
    assert due == [early] and plain.others([early, late], due) == [early]
    early.plain_end = 5
    plain.renew(due)
    plain.launch(2)
    assert plain.launch(3) is rows, "the same rows are listed anew"
    late.end_plain()
    assert plain.pop_changed() == [late] and not plain.pop_changed()
    assert plain.pop_due() == [early] and list(plain) == [early]
    assert late.num_computed_tokens == 8 and late.last_step_id == 3
    plain.leave_all()
    plain.launch(4)
    assert (early.num_computed_tokens, early.last_step_id, len(plain)) == (5, 3, 0)


def test_plans_that_check_all_sequences_keep_no_sequence_that_has_left() -> None:
    plain, sequence = PlainSequences(), decoding(1, plain_end=3)
    plain.renew([sequence])
    for step_id in range(4):
        due, others = plain.find_others([sequence], checks_all=True)
        if sequence.num_computed_tokens == sequence.plain_end:
            sequence.plain_end = 5  # as if its table had grown
        plain.settle(due, others, {}, may_stay=True)
        plain.launch(step_id)
    assert sequence.num_computed_tokens == sequence.plain_end == 5
    plain.leave_all()
    plain.launch(4)
    reference = weakref.ref(sequence)
    del sequence, due, others
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_sequences_that_count_for_themselves(seed: int) -> None:
    draws, plain = Random(seed), PlainSequences()
    sequences = [decoding(row, plain_end=10_000) for row in range(6)]
    computed = {each: each.num_computed_tokens for each in sequences}
    confirmed, pending = dict(computed), dict.fromkeys(sequences, 0)
    in_flight: list[PlainRows] = []
    for step_id in range(100):
        members = set(draws.sample(sequences, draws.randrange(7)))
        plain.leave(set(plain) - members)
        plain.renew(members)
        in_flight.append(plain.launch(step_id))
        for each in members:
            computed[each] += 1
            pending[each] += 1
        while len(in_flight) > draws.randrange(3):
            rows = in_flight.pop(0)
            if rows.sequences and draws.random() < 0.3:  # a row does more than append its token
                lost = draws.choice(rows.sequences)
                rows = rows.changed([lost], ())
                lost.num_confirmed_tokens += 1
                lost.num_pending_tokens -= 1
                confirmed[lost] += 1
                pending[lost] -= 1
            plain.apply(rows)
            for each in rows.sequences:
                confirmed[each] += 1
                pending[each] -= 1
        found = {each: each.num_computed_tokens for each in sequences}
        assert found == computed and plain.num_computed_tokens == sum(map(found.get, plain))
        assert {each: each.num_confirmed_tokens for each in sequences} == confirmed
        assert {each: each.num_pending_tokens for each in sequences} == pending
        lengths = [len(each.token_ids) + pending[each] for each in sequences]
        assert [each.num_tokens for each in sequences] == lengths
