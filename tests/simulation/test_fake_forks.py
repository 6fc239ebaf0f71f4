"""Forks, edits of tokens and copies in the fake runner: what they give, and what is refused."""

from typing import Any

import pytest
from tests.core.harness import launch
from tests.simulation.test_fake_runner import (
    APPEND,
    MODEL,
    PARAMS,
    REPLACE,
    admit,
    expected,
    first,
    make,
    plan,
    started,
)

from quire.core.request import Request
from quire.core.step import BlockCopy, Chunk, RowFork, StepPlan, TableEdit, TokenEdit
from quire.simulation.fakes.fake_model import fingerprints_of
from quire.simulation.fakes.fake_runner import FakeRunner

TOKENS = [1, 2, 3, 4, 5, 6]


def fork(row: int, source_row: int, branch_index: int = 1, *, joins: bool = False) -> RowFork:
    return RowFork(row, source_row, PARAMS, branch_index, joins)


def of_branch(token_ids: list[int], branch_index: int, count: int) -> list[int]:
    output = MODEL.expected_output(Request("r", token_ids, PARAMS), branch_index)
    return list(output.token_ids[:count])


def told(runner: FakeRunner) -> dict[int, int]:
    result = runner.result()
    return {row: ids[0] for row, ids in zip(result.rows, result.token_ids, strict=True)}


def join(**more: Any) -> StepPlan:
    """Row 0 computes its prompt, rows 1 and 2 join."""
    forks = [fork(1, 0, 1, joins=True), fork(2, 0, 2, joins=True)]
    admission = admit(0, TOKENS, (0, 1))
    chunks = [Chunk(0, 6)]
    return plan(0, 3, 6, **{"admit": [admission], "forks": forks, "chunks": chunks, **more})


def test_forks_that_join_a_step_sample_their_own_tokens_and_go_on() -> None:
    runner = make()
    launch(runner, join())
    assert told(runner) == {row: of_branch(TOKENS, row, 1)[0] for row in range(3)}
    edits = [TableEdit(row, 0, REPLACE, 1, (4 + row,)) for row in (1, 2)]
    copies = [BlockCopy(1, 5), BlockCopy(1, 6)]
    launch(runner, plan(1, 3, 3, table_edits=edits, copies=copies))
    assert told(runner) == {row: of_branch(TOKENS, row, 2)[1] for row in range(3)}


def test_a_fork_that_joins_gets_the_edits_of_its_source() -> None:
    runner = make()
    launch(runner, plan(0, 1, 4, admit=[admit(0, TOKENS, (0,))], chunks=[Chunk(0, 4)]))
    runner.result()
    edits = [TableEdit(row, 0, APPEND, 1, (7,)) for row in (0, 1)]
    joining = plan(1, 2, 2, forks=[fork(1, 0, joins=True)], table_edits=edits, chunks=[Chunk(0, 2)])
    launch(runner, joining)
    assert told(runner) == {row: of_branch(TOKENS, row, 1)[0] for row in range(2)}


def test_a_fork_of_a_live_row_may_get_another_last_token() -> None:
    runner = started()
    edits = [TableEdit(1, 0, REPLACE, 1, (5,))]
    changes = plan(
        1,
        2,
        2,
        forks=[fork(1, 0, 0)],
        token_edits=[TokenEdit(1, 6, (77,))],
        table_edits=edits,
        copies=[BlockCopy(1, 5)],
    )
    launch(runner, changes)
    assert told(runner) == {0: expected(TOKENS, 2)[1], 1: expected([*TOKENS, 77], 1)[0]}


def test_a_row_that_is_released_can_be_forked_into_in_the_same_plan() -> None:
    runner = make()
    rows = [admit(0, TOKENS, (0, 1)), admit(1, [9, 8, 7], (2,))]
    launch(runner, plan(0, 2, 9, admit=rows, chunks=[Chunk(0, 6), Chunk(1, 3)]))
    runner.result()
    edits, copies = [TableEdit(1, 0, REPLACE, 1, (5,))], [BlockCopy(1, 5)]
    again = plan(1, 2, 2, release=[1], forks=[fork(1, 0, 0)], table_edits=edits, copies=copies)
    launch(runner, again)
    assert told(runner) == dict.fromkeys((0, 1), expected(TOKENS, 2)[1])


def test_a_row_that_searches_beams_brings_its_candidates() -> None:
    runner = make()
    beam = admit(0, TOKENS, (0, 1), beam_width=2, end_token_ids=(0,))
    launch(runner, plan(0, 1, 6, admit=[beam], chunks=[Chunk(0, 6)]))
    result = runner.result()
    prefix = int(fingerprints_of(TOKENS)[-1])
    candidates = MODEL.beam_candidates(prefix, 3)
    (entry,) = result.logprobs[0]
    assert list(zip(entry.top_token_ids, entry.top_logprobs, strict=True)) == candidates
    assert result.token_ids == [(candidates[0][0],)]
    assert (entry.token_id, entry.logprob, entry.rank) == (*candidates[0], 1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"forks": [fork(0, 0)]}, "fork into row 0, which is not free"),
        ({"forks": [fork(3, 0)]}, "fork into row 3, which is not free"),
        ({"forks": [fork(2, 1)]}, "fork into row 2 of row 1, which is not live"),
        ({"forks": [fork(1, 0)], "num_rows": 2, "num_tokens": 2}, "block 1, which is shared"),
        (
            {
                "forks": [fork(1, 0, joins=True)],
                "chunks": [Chunk(0, 0)],
                "num_rows": 2,
                "num_tokens": 0,
            },
            "computes nothing",
        ),
        (
            {"forks": [fork(1, 0, joins=True)], "chunks": [Chunk(1, 1)], "num_rows": 2},
            "row that is not live, or twice",
        ),
        (
            {
                "forks": [fork(1, 0, joins=True)],
                "table_edits": [TableEdit(1, 0, APPEND, 2, (7,))],
                "num_rows": 2,
            },
            "row 1 joins row 0, but their tables",
        ),
        ({"token_edits": [TokenEdit(1, 6, (7,))]}, "token edit of row 1, which is not live"),
        ({"token_edits": [TokenEdit(0, 8, (7,))]}, "of a row with 7 tokens"),
        ({"token_edits": [TokenEdit(0, 5, (7, 7))]}, "replaces computed tokens"),
        ({"token_edits": [TokenEdit(0, 6, ())]}, "replaces computed tokens"),
        (
            {"copies": [BlockCopy(0, 8), BlockCopy(1, 8)]},
            "a block is the target of two copies",
        ),
        (
            {"copies": [BlockCopy(0, 8), BlockCopy(8, 9)]},
            "a block is the source and the target of a copy",
        ),
        (
            {"copies": [BlockCopy(8, 9)], "table_edits": [TableEdit(0, 0, APPEND, 2, (8,))]},
            "given out before they are copied",
        ),
    ],
)
def test_forks_edits_and_copies_that_make_no_sense_are_refused(
    parts: dict[str, Any], message: str
) -> None:
    runner = started()
    bad = {"num_rows": 1, "num_tokens": 1, **parts}
    with pytest.raises(AssertionError, match=message):
        launch(runner, plan(1, **bad))


def test_a_copy_into_a_block_of_two_rows_is_refused() -> None:
    runner = started()
    other = admit(1, [*TOKENS, 5, 5, 5], (0, 1, 9), computed=8)
    with pytest.raises(AssertionError, match="block 1 is copied to, but held"):
        launch(runner, plan(1, 2, 2, admit=[other], copies=[BlockCopy(0, 1)]))


def test_a_join_of_a_row_that_keeps_its_gap_is_refused() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="row 1 joins row 0, which does not sample"):
        bad = join(chunks=[Chunk(0, 4)])
        launch(runner, plan(0, 3, 4, admit=bad.admit, forks=bad.forks, chunks=bad.chunks))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"forks": [fork(1, 0)], "num_rows": 2}, "fork into row 1 of row 0, whose last token is"),
        ({"token_edits": [TokenEdit(0, 6, (7,))]}, "token edit of row 0, whose last token is"),
    ],
)
def test_plans_that_need_a_token_in_flight_are_refused(parts: dict[str, Any], message: str) -> None:
    runner = make()
    launch(runner, first())
    with pytest.raises(AssertionError, match=message):
        launch(runner, plan(1, **{"num_rows": 1, "num_tokens": 1, **parts}))


def test_a_source_given_out_while_its_copy_is_in_flight_is_caught() -> None:
    runner = started()
    partly = admit(1, [1, 2, 9], (7,), computed=2)
    launch(runner, plan(1, 2, 2, admit=[partly], copies=[BlockCopy(0, 7)]))
    early = admit(2, [5, 5], (0,))
    release = plan(2, 2, 3, release=[0], admit=[early], chunks=[Chunk(2, 2)])
    with pytest.raises(AssertionError, match="block 0 is given out, but step 1"):
        launch(runner, release)


def test_a_copy_that_is_missing_is_caught_where_it_is_read() -> None:
    runner = started()
    partly = admit(1, [1, 2, 9], (7,), computed=2)
    launch(runner, plan(1, 2, 2, admit=[partly]))
    with pytest.raises(AssertionError, match="row 1 reads a wrong token 0 in group 0"):
        runner.result()


def test_a_fork_of_a_row_that_fails_fails_too() -> None:
    runner = make(nan_token_id=98)
    bad = admit(0, [98, 5, 5], (2,))
    joining = [fork(1, 0, joins=True)]
    launch(runner, plan(0, 2, 3, admit=[bad], forks=joining, chunks=[Chunk(0, 3)]))
    result = runner.result()
    assert (result.rows, sorted(result.failed)) == ([], [0, 1])
