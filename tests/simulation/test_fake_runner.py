"""Plans that a real runner could not carry out are refused, and good ones give known tokens."""

from typing import Any

import pytest
from tests.core.harness import launch

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    HOLE_BLOCK,
    BlockCopy,
    Chunk,
    EditKind,
    RowAdmission,
    StepPlan,
    TableEdit,
)
from quire.simulation.fakes.fake_model import FakeModel, branch_salt, fingerprints_of
from quire.simulation.fakes.fake_runner import FakeRunner, Faults, InjectedFailureError

APPEND, REPLACE, CUT, HOLE = EditKind.APPEND, EditKind.REPLACE, EditKind.TRUNCATE, EditKind.HOLE
MODEL = FakeModel(end_rate=0.0)
PARAMS = DecodingParams(50, seed=3)


def make(*, num_groups: int = 1, window: int | None = None, **faults: Any) -> FakeRunner:
    kind = KVKind.FULL if window is None else KVKind.WINDOW
    groups = tuple(KVGroup((index,), kind, 64, window) for index in range(num_groups))
    return FakeRunner(
        groups, 16, 4, max_num_rows=3, max_num_tokens=40, model=MODEL, faults=Faults(**faults)
    )


def admit(
    row: int, token_ids: list[int], *tables: tuple[int, ...], computed: int = 0, **params: Any
) -> RowAdmission:
    decoding = DecodingParams(50, seed=3, **params)
    return RowAdmission(row, token_ids, len(token_ids), computed, tables, decoding)


def plan(step_id: int, num_rows: int, num_tokens: int, **parts: Any) -> StepPlan:
    return StepPlan(step_id, num_rows, num_tokens, **{k: tuple(v) for k, v in parts.items()})


def first(row: int = 0, length: int = 6, step_id: int = 0) -> StepPlan:
    """A plan that admits one row with two blocks and computes all its tokens."""
    admission = admit(row, list(range(1, length + 1)), (0, 1))
    return plan(step_id, 1, length, admit=[admission], chunks=[Chunk(row, length)])


def started(**options: Any) -> FakeRunner:
    """A runner with row 0 live: 6 tokens computed, one sampled, blocks 0 and 1."""
    runner = make(**options)
    launch(runner, first())
    runner.result()
    return runner


def expected(token_ids: list[int], count: int) -> list[int]:
    output = MODEL.expected_output(Request("r", token_ids, PARAMS))
    return list(output.token_ids[:count])


# ---- what it samples ----------------------------------------------------------------------------


def test_it_samples_what_the_request_gets_alone() -> None:
    runner = make()
    launch(runner, first())
    tokens = [*runner.result().token_ids]
    launch(runner, plan(1, 1, 1))
    tokens += runner.result().token_ids
    launch(runner, plan(2, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, (5,))]))
    tokens += runner.result().token_ids
    assert [token for (token,) in tokens] == expected([1, 2, 3, 4, 5, 6], 3)


def test_a_chunk_that_leaves_a_gap_samples_nothing() -> None:
    runner = make()
    admission = admit(0, [1, 2, 3, 4, 5, 6], (0, 1))
    launch(runner, plan(0, 1, 4, admit=[admission], chunks=[Chunk(0, 4)]))
    assert runner.result().rows == []
    launch(runner, plan(1, 1, 2, chunks=[Chunk(0, 2)]))
    assert runner.result().token_ids == [(expected([1, 2, 3, 4, 5, 6], 1)[0],)]


def test_one_step_ahead_gives_the_same_tokens() -> None:
    runner = make()
    launch(runner, first())
    launch(runner, plan(1, 1, 1))
    early = runner.result()
    launch(runner, plan(2, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, (5,))]))
    results = [early, runner.result(), runner.result()]
    assert [result.step_id for result in results] == [0, 1, 2]
    tokens = [token for result in results for (token,) in result.token_ids]
    assert tokens == expected([1, 2, 3, 4, 5, 6], 3)


def test_a_late_token_does_not_reach_the_rows_next_owner() -> None:
    runner = make()
    launch(runner, first())
    again = admit(0, [9, 8, 7], (2,))
    launch(runner, plan(1, 1, 3, release=[0], admit=[again], chunks=[Chunk(0, 3)]))
    runner.result()
    assert runner.result().token_ids == [(expected([9, 8, 7], 1)[0],)]


def test_a_paused_row_stays_as_it_is() -> None:
    runner = started()
    other = admit(1, [5, 5, 5], (2,))
    launch(runner, plan(1, 2, 3, admit=[other], chunks=[Chunk(0, 0), Chunk(1, 3)]))
    assert runner.result().rows == [1]
    launch(runner, plan(2, 2, 2))
    assert sorted(runner.result().rows) == [0, 1]


def test_a_reset_drops_rows_and_keeps_blocks() -> None:
    runner = started()
    runner.reset()
    resumed = admit(0, [1, 2, 3, 4, 5, 6], (0, 7), computed=4)
    launch(runner, plan(1, 1, 2, admit=[resumed], chunks=[Chunk(0, 2)]))
    assert runner.result().token_ids == [(expected([1, 2, 3, 4, 5, 6], 1)[0],)]


def test_log_probabilities_follow_the_positions_computed() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    whole = MODEL.expected_output(
        Request("r", tokens, DecodingParams(2, seed=3, logprobs=1, prompt_logprobs=2))
    )
    runner = make()
    admission = admit(1, tokens, (0, 1), logprobs=1, prompt_logprobs=2)
    launch(runner, plan(0, 1, 4, admit=[admission], chunks=[Chunk(1, 4)]))
    result = runner.result()
    assert result.logprobs == {} and whole.prompt_logprobs is not None
    assert result.prompt_logprobs == {1: whole.prompt_logprobs[:4]}
    launch(runner, plan(1, 1, 2, chunks=[Chunk(1, 2)]))
    result = runner.result()
    assert whole.logprobs is not None
    assert result.logprobs == {1: whole.logprobs[:1]}
    assert result.prompt_logprobs == {1: whole.prompt_logprobs[4:]}
    launch(runner, plan(2, 1, 1))
    result = runner.result()
    assert (result.logprobs, result.prompt_logprobs) == ({1: whole.logprobs[1:]}, {})


# ---- edits and copies ---------------------------------------------------------------------------


def test_copy_on_write() -> None:
    """Row 1 forks row 0 in the middle of block 1: both share it until the copy."""
    runner = started()
    tokens = [1, 2, 3, 4, 5, 6]
    fork = admit(1, [*tokens, 77], (0, 1), computed=6)
    edits = [TableEdit(1, 0, REPLACE, 1, (8,))]
    copies = [BlockCopy(1, 8)]
    launch(runner, plan(1, 2, 2, admit=[fork], table_edits=edits, copies=copies))
    result = runner.result()
    assert dict(zip(result.rows, result.token_ids, strict=True)) == {
        0: (expected(tokens, 2)[1],),
        1: (expected([*tokens, 77], 1)[0],),
    }


def test_a_hole_outside_the_window_is_never_read() -> None:
    runner = make(window=3)
    admission = admit(0, list(range(1, 9)), (0, 1, 2))
    launch(runner, plan(0, 1, 8, admit=[admission], chunks=[Chunk(0, 8)]))
    runner.result()
    launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 0, HOLE, 0, (HOLE_BLOCK,))]))
    assert runner.result().rows == [0]
    taken = admit(1, [5, 5], (0,))
    launch(runner, plan(2, 2, 3, admit=[taken], chunks=[Chunk(1, 2)]))
    assert sorted(runner.result().rows) == [0, 1]


def test_a_hole_inside_the_window_is_caught() -> None:
    runner = make(window=6)
    admission = admit(0, list(range(1, 9)), (0, 1, 2))
    launch(runner, plan(0, 1, 8, admit=[admission], chunks=[Chunk(0, 8)]))
    runner.result()
    launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 0, HOLE, 0, (HOLE_BLOCK,))]))
    with pytest.raises(AssertionError, match="row 0 reads a wrong token 3 in group 0"):
        runner.result()


def test_a_cut_gives_blocks_back() -> None:
    runner = started()
    launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, (5, 6))]))
    runner.result()
    other = admit(1, [5, 5], (6,))
    cut = TableEdit(0, 0, CUT, 3)
    launch(runner, plan(2, 1, 1, table_edits=[cut]))
    runner.result()
    launch(runner, plan(3, 2, 3, admit=[other], chunks=[Chunk(1, 2)]))
    assert sorted(runner.result().rows) == [0, 1]


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(1, 1, 1, admit=[admit(0, [1, 2], (5,))]), "admission into row 0, which is live"),
        (plan(1, 2, 1, admit=[admit(3, [1, 2], (5,))]), "admission into row 3 of 3"),
        (plan(1, 2, 2, admit=[admit(1, [1], (5,), computed=1)]), "1 of 1 tokens computed"),
        (plan(1, 2, 2, admit=[admit(1, [], (5,))]), "0 of 0 tokens computed"),
        (plan(1, 2, 2, admit=[admit(1, [1] * 41, (5,))]), "0 of 41 tokens computed"),
        (plan(1, 2, 2, admit=[admit(1, [1], (5,), (6,))]), "with 2 tables"),
        (plan(1, 2, 2, admit=[admit(1, [1], (1,))]), r"block 1 is given to row 1 as new.*\(0, 0\)"),
        (plan(1, 2, 2, admit=[admit(1, [1], (16,))]), "the pool has 16"),
        (plan(1, 2, 2, admit=[admit(1, [1] * 9, (0,), computed=8)]), "the table has 1 blocks"),
        (plan(1, 0, 1, release=[1]), "release of row 1, which is not live"),
        (plan(1, 0, 1, release=[0, 0]), "release of row 0, which is not live"),
        (plan(1, 1, 1, table_edits=[TableEdit(2, 0, APPEND, 0, (5,))]), "edit of row 2, which is"),
        (
            plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 1, (5,))]),
            "APPEND at 1 to a table of 2",
        ),
        (
            plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 3, (5,))]),
            "APPEND at 3 to a table of 2",
        ),
        (
            plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, (1,))]),
            "block 1 is given to row 0",
        ),
        (plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, tuple(range(2, 16)))]), "its bound"),
        (
            plan(1, 1, 1, table_edits=[TableEdit(0, 0, REPLACE, 1, (5, 6))]),
            "replace beyond a table",
        ),
        (plan(1, 1, 1, table_edits=[TableEdit(0, 0, CUT, 1)]), "row 0"),
        (plan(1, 1, 1, table_edits=[TableEdit(0, 0, HOLE, 0, (5,))]), "a hole names blocks"),
        (plan(1, 2, 1), "1 rows live, the plan says 2"),
        (plan(1, 1, 2), "1 tokens to compute, the plan says 2"),
        (plan(1, 1, 2, chunks=[Chunk(0, 2)]), "a chunk of row 0 ends beyond its 7 tokens"),
        (plan(1, 1, 1, chunks=[Chunk(1, 1)]), "names a row that is not live, or twice"),
        (
            plan(1, 1, 2, chunks=[Chunk(0, 1), Chunk(0, 1)]),
            "names a row that is not live, or twice",
        ),
        (plan(1, 1, 0, chunks=[Chunk(0, 0)]), "computes nothing"),
        (plan(0, 1, 1), "step 0 after step 0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(bad: StepPlan, message: str) -> None:
    runner = started()
    with pytest.raises(AssertionError, match=message):
        launch(runner, bad)


def test_an_implicit_decode_needs_the_gap_to_be_one() -> None:
    runner = started()
    other = admit(1, [5, 5, 5], (2,))
    with pytest.raises(AssertionError, match="row 1 decodes implicitly, but 0 of its 3 tokens"):
        launch(runner, plan(1, 2, 2, admit=[other]))


def test_a_row_without_a_slot_is_refused() -> None:
    runner = started()
    for step_id in (1, 2):
        launch(runner, plan(step_id, 1, 1))
        runner.result()
    with pytest.raises(AssertionError, match="row 0 has no slot for its new tokens in group 0"):
        launch(runner, plan(3, 1, 1))


def test_a_group_that_was_forgotten_is_refused() -> None:
    runner = make(num_groups=2)
    admission = admit(0, [1, 2, 3, 4], (0,), (1,))
    launch(runner, plan(0, 1, 4, admit=[admission], chunks=[Chunk(0, 4)]))
    runner.result()
    with pytest.raises(AssertionError, match="no slot for its new tokens in group 1"):
        launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 1, (5,))]))


def test_a_write_into_a_shared_block_is_refused() -> None:
    runner = started()
    fork = admit(1, [1, 2, 3, 4, 5, 6, 77], (0, 1), computed=6)
    with pytest.raises(AssertionError, match=r"block 1, which is shared.*\[\(0, 0\), \(1, 0\)\]"):
        launch(runner, plan(1, 2, 2, admit=[fork]))


def test_a_write_into_a_hole_is_refused() -> None:
    runner = started(window=2)
    with pytest.raises(AssertionError, match="row 0 would write into a hole"):
        launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 0, HOLE, 1, (HOLE_BLOCK,))]))


def test_a_prefix_that_is_not_what_the_block_holds_is_caught_where_it_is_read() -> None:
    runner = started()
    liar = admit(1, [1, 2, 3, 9, 5, 6], (0, 7), computed=4)
    launch(runner, plan(1, 2, 3, admit=[liar], chunks=[Chunk(1, 2)]))
    message = (
        r"row 1 reads a wrong token 3 in group 0 \(block 0, slot 3\); row 0 in step 0 wrote it"
    )
    with pytest.raises(AssertionError, match=message):
        runner.result()


def test_a_block_of_another_group_is_caught() -> None:
    runner = make(num_groups=2)
    admission = admit(0, [1, 2, 3, 4, 5], (0, 1), (2, 3))
    launch(runner, plan(0, 1, 5, admit=[admission], chunks=[Chunk(0, 5)]))
    runner.result()
    swapped = admit(1, [1, 2, 3, 4, 5], (2, 5), (0, 6), computed=4)
    launch(runner, plan(1, 2, 2, admit=[swapped]))
    with pytest.raises(AssertionError, match="row 1 reads a wrong token 0 in group 0"):
        runner.result()


def test_a_block_given_out_while_a_step_in_flight_reads_it_is_caught() -> None:
    runner = make()
    launch(runner, first())
    early = admit(1, [5, 5], (1,))
    message = "block 1 is given out, but step 0, which is in flight, uses it"
    with pytest.raises(AssertionError, match=message):
        launch(runner, plan(1, 1, 2, release=[0], admit=[early], chunks=[Chunk(1, 2)]))


def test_a_refusal_tells_the_rows_history() -> None:
    runner = started()
    launch(runner, plan(1, 2, 3, admit=[admit(1, [5, 5], (2,))], chunks=[Chunk(1, 2)]))
    runner.result()
    with pytest.raises(AssertionError) as caught:
        launch(runner, plan(2, 2, 3, chunks=[Chunk(0, 2)]))
    lines = str(caught.value).splitlines()
    assert lines[1] == "the last plans, for row 0:"
    assert lines[2].startswith("  step 0: 1 rows, 6 tokens; admit 0 with 0 of 6 tokens computed")
    assert lines[3] == "  step 1: 2 rows, 3 tokens"
    assert lines[4] == f"  step 2: 2 rows, 3 tokens; {Chunk(0, 2)}"


def test_a_cut_row_computes_again_what_was_cut() -> None:
    runner = started()  # 6 tokens computed in blocks of 4, one sampled
    edits = [TableEdit(0, 0, CUT, 1), TableEdit(0, 0, APPEND, 1, (6,))]
    launch(runner, plan(1, 1, 3, table_edits=edits, chunks=[Chunk(0, 3)]))
    assert runner.result().token_ids == [(expected([1, 2, 3, 4, 5, 6], 2)[1],)]


def test_a_mask_leaves_the_tokens_that_it_allows() -> None:
    runner = make()
    runner.execute(first())
    runner.sample({0: [bytes([0, 0b1010])]})  # tokens 9 and 11
    (token_ids,) = runner.result().token_ids
    assert token_ids[0] in (9, 11)
    launch(runner, plan(1, 1, 1))
    salt = branch_salt(PARAMS.seed, 0)
    prefix = int(fingerprints_of([*first().admit[0].token_ids, *token_ids])[-1])
    assert runner.result().token_ids == [(MODEL.next_token(prefix, salt),)]


def test_a_third_step_in_flight_is_refused() -> None:
    runner = started()
    with pytest.raises(AssertionError, match="without a sampled step in flight"):
        runner.result()
    launch(runner, plan(2, 1, 1))
    launch(runner, plan(3, 1, 1, table_edits=[TableEdit(0, 0, APPEND, 2, (5,))]))
    with pytest.raises(AssertionError, match="while 2 are in flight"):
        launch(runner, plan(4, 1, 1))


# ---- injected failures --------------------------------------------------------------------------


def test_chosen_steps_fail_and_nothing_goes_on_without_a_reset() -> None:
    runner = make(execute_fails_at=frozenset({1}), sample_fails_at=frozenset({2}))
    launch(runner, first())
    runner.result()
    with pytest.raises(InjectedFailureError, match="execute of step 1 fails"):
        launch(runner, plan(1, 1, 1))
    with pytest.raises(AssertionError, match="without a reset"):
        launch(runner, plan(2, 1, 1))
    with pytest.raises(AssertionError, match="without a reset"):
        runner.result()
    runner.reset()
    launch(runner, first(step_id=2))
    with pytest.raises(InjectedFailureError, match="sample of step 2 fails"):
        runner.result()


def test_a_failed_step_leaves_garbage_where_it_was_to_write() -> None:
    runner = started(execute_fails_at=frozenset({1}))
    with pytest.raises(InjectedFailureError):
        launch(runner, plan(1, 1, 1))
    runner.reset()
    liar = admit(
        0, [1, 2, 3, 4, 5, 6, expected([1, 2, 3, 4, 5, 6], 1)[0], 9, 9], (0, 1, 2), computed=8
    )
    launch(runner, plan(2, 1, 1, admit=[liar]))
    with pytest.raises(AssertionError, match=r"a wrong token 6 .*; no row wrote it last"):
        runner.result()


def test_a_poison_fails_every_step_that_it_computes_in() -> None:
    runner = started(poison_token_id=99)
    poison = admit(1, [99, 5], (2,))
    with pytest.raises(InjectedFailureError):
        launch(runner, plan(1, 2, 3, admit=[poison], chunks=[Chunk(1, 2)]))
    runner.reset()
    launch(runner, first(step_id=2))
    runner.result()
    launch(runner, plan(3, 2, 1, admit=[poison], chunks=[Chunk(1, 0)]))
    assert runner.result().rows == [0]


def test_a_nan_row_fails_alone_where_it_would_sample() -> None:
    runner = started(nan_token_id=98)
    bad = admit(1, [98, 5, 5], (2,))
    launch(runner, plan(1, 2, 3, admit=[bad], chunks=[Chunk(1, 2)]))
    result = runner.result()
    assert (result.rows, result.failed) == ([0], {})
    launch(runner, plan(2, 2, 2, table_edits=[TableEdit(0, 0, APPEND, 2, (5,))]))
    result = runner.result()
    assert (result.rows, result.failed) == ([0], {1: "NaN in the logits of row 1"})


def test_the_failure_rate_is_a_function_of_seed_and_step() -> None:
    faults = [Faults(step_failure_rate=0.2, seed=seed) for seed in (1, 1, 2)]
    hits = [
        [fault.hits_execute(step) or fault.hits_sample(step) for step in range(2000)]
        for fault in faults
    ]
    assert hits[0] == hits[1] != hits[2]
    assert 0.15 < sum(hits[0]) / 2000 < 0.25
    assert not any(Faults().hits_execute(step) for step in range(100))
