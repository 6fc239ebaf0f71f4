"""RowBatch against a slow model of the same rows, and each kind of change that a plan makes."""

import random

import numpy as np
import pytest
import torch
from tests.runtime.slow_rows import BLOCK_SIZE, NUM_ROWS, SlowRows, admit, fork, slots

from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    HOLE_BLOCK,
    Chunk,
    EditKind,
    StepPlan,
    TableEdit,
    TokenEdit,
)
from quire.runtime.batch import RowBatch, StepBatch
from quire.sampling.host.sampler import NO_TOKEN, SampledTokens

SCORED = DecodingParams(max_tokens=8, prompt_logprobs=1)


def make_rows(num_groups: int = 1, num_rows: int = 6) -> RowBatch:
    return RowBatch(
        num_rows=num_rows,
        max_model_len=64,
        max_num_tokens=64 * num_rows,
        num_groups=num_groups,
        block_size=BLOCK_SIZE,
    )


def step_of(rows: RowBatch, plan: StepPlan) -> StepBatch:
    rows.change(plan)
    return rows.build(plan)


def test_a_chunk_and_a_decode_row_become_one_flat_step() -> None:
    rows = make_rows()
    first, second = (9, 4), (3, 7, 5)
    admissions = (
        admit(4, [11, 12, 13], first, num_computed_tokens=2, num_prompt_tokens=1),
        admit(1, list(range(20, 40)), second, num_computed_tokens=8),
    )
    plan = StepPlan(0, 2, 6, admit=admissions, chunks=(Chunk(1, 5),))
    rows.change(plan)
    step = rows.build(plan)
    assert step.rows.tolist() == [4, 1]
    assert step.token_ids.tolist() == [13, 28, 29, 30, 31, 32]
    assert step.positions.tolist() == [2, 8, 9, 10, 11, 12]
    assert step.attention.num_decodes == 1
    assert step.attention.query_start.tolist() == [0, 1, 6]
    assert step.attention.query_lens_list == [1, 5]
    assert step.attention.context_lens.tolist() == step.attention.context_lens_list == [3, 13]
    group = step.attention.groups[0]
    expected = slots(first, range(2, 3)) + slots(second, range(8, 13))
    assert group.slot_mapping.tolist() == expected
    assert step.attention.rows.tolist() == step.attention.rows_list == [4, 1]
    assert group.block_tables[step.attention.rows, :2].tolist() == [[9, 4], [3, 7]]
    assert step.sample_rows.tolist() == [4]  # row 1 has 7 tokens left
    assert step.sample_index.tolist() == [0]


def test_sampled_tokens_are_the_next_inputs() -> None:
    rows = make_rows()
    plan = StepPlan(0, 1, 3, admit=(admit(2, [5, 6, 7], (1,)),), chunks=(Chunk(2, 3),))
    rows.change(plan)
    assert rows.build(plan).sample_rows.tolist() == [2]
    rows.append_sampled(np.array([2]), np.array([42]))
    for token_id in (43, 44):
        plan = StepPlan(1, 1, 1)
        rows.change(plan)
        step = rows.build(plan)
        assert step.token_ids.tolist() == [token_id - 1]
        assert step.sample_rows.tolist() == [2]
        rows.append_sampled(np.array([2]), np.array([token_id]))
    assert rows.history.token_ids[2, :6].tolist() == [5, 6, 7, 42, 43, 44]
    assert rows.history.num_tokens[2] == 6


def test_long_decoding_in_changing_company() -> None:
    """Steps in which all rows decode reuse what the last one made; each equals a lonely row's."""
    rows = make_rows(num_groups=2, num_rows=4)
    tables = {
        row: ([10 * row + i for i in range(8)], [50 + 10 * row - i for i in range(8)])
        for row in range(4)
    }
    length: dict[int, int] = {}

    def step(admitted: tuple[int, ...] = (), released: tuple[int, ...] = ()) -> StepBatch:
        for row in released:
            del length[row]
        admissions = tuple(
            admit(row, [7] * (row + 1), *map(tuple, tables[row]), num_computed_tokens=row)
            for row in admitted
        )
        length.update({row: row + 1 for row in admitted})
        plan = StepPlan(0, len(length), len(length), release=released, admit=admissions)
        made = step_of(rows, plan)
        order = sorted(length)
        assert made.rows.tolist() == made.sample_rows.tolist() == order
        assert made.sample_index.tolist() == list(range(len(order)))
        assert made.attention.num_decodes == len(order)
        assert made.attention.query_start.tolist() == list(range(len(order) + 1))
        assert made.attention.rows_list == made.attention.rows.tolist() == order
        assert made.positions.tolist() == [length[row] - 1 for row in order]
        assert made.token_ids.tolist() == [rows.token_ids[row, length[row] - 1] for row in order]
        contexts = [length[row] for row in order]
        assert made.attention.context_lens.tolist() == contexts
        assert made.attention.context_lens_list == contexts
        for index, group in enumerate(made.attention.groups):
            last = [slots(tables[row][index], range(length[row]))[-1] for row in order]
            assert group.slot_mapping.tolist() == last
        rows.append_sampled(made.sample_rows, np.array([100 * row + length[row] for row in order]))
        for row in order:
            length[row] += 1
        return made

    first = step(admitted=(0, 2))
    for _ in range(20):  # beyond two blocks
        assert step().rows is first.rows, "nothing is made anew while the rows are the same"
    step(admitted=(1,))
    for _ in range(10):
        step()
    step(released=(0,), admitted=(3,))
    for _ in range(10):
        step()


def test_an_unnamed_row_may_leave_its_gap_open() -> None:
    rows = make_rows()
    admissions = (admit(0, [1, 2, 3], (0,), num_computed_tokens=1), admit(1, [4], (1,)))
    step = step_of(rows, StepPlan(0, 2, 2, admit=admissions))
    assert step.token_ids.tolist() == [2, 4]
    assert step.sample_rows.tolist() == [1]
    assert step.sample_index.tolist() == [1]


def test_a_paused_row_computes_nothing_and_others_go_on() -> None:
    rows = make_rows()
    admissions = (admit(0, [1, 2], (0,)), admit(1, [3, 4], (1,)))
    plan = StepPlan(0, 2, 4, admit=admissions, chunks=(Chunk(0, 2), Chunk(1, 2)))
    rows.change(plan)
    rows.build(plan)
    rows.append_sampled(np.array([0, 1]), np.array([8, 9]))
    plan = StepPlan(1, 2, 1, chunks=(Chunk(0, 0),))
    rows.change(plan)
    step = rows.build(plan)
    assert step.rows.tolist() == [1]
    assert step.token_ids.tolist() == [9]


def test_decoding_goes_on_in_the_same_memory_while_the_same_rows_pause() -> None:
    rows = make_rows()
    admissions = tuple(admit(row, [row], (row,)) for row in range(4))
    steps = [step_of(rows, StepPlan(0, 4, 4, admit=admissions))]
    inputs = []
    for paused in ((1, 3), (1, 3), (1,), ()):
        rows.append_sampled(steps[-1].sample_rows, 10 * len(steps) + steps[-1].sample_rows)
        chunks = tuple(Chunk(row, 0) for row in paused)
        steps.append(step_of(rows, StepPlan(1, 4, 4 - len(paused), chunks=chunks)))
        inputs.append(steps[-1].token_ids.tolist())
    assert inputs == [[10, 12], [20, 22], [30, 32, 13], [40, 11, 42, 43]]
    assert [step.rows.tolist() for step in steps[2:]] == [[0, 2], [0, 2, 3], [0, 1, 2, 3]]
    assert steps[1] is steps[2]


class Sampled:
    """A sample of which one row failed."""

    def fetch(self) -> SampledTokens:
        return SampledTokens(np.array([7, NO_TOKEN]), failed={1: "broken"})


def test_a_row_that_failed_can_be_computed_once_more() -> None:
    rows = make_rows()
    step = step_of(rows, StepPlan(0, 2, 2, admit=(admit(0, [1], (1,)), admit(1, [2], (2,)))))
    rows.store_sampled(step.sample_rows, Sampled())
    assert step_of(rows, StepPlan(1, 2, 2)).token_ids.tolist() == [7, 0]


def test_tokens_that_are_stored_elsewhere_are_only_counted() -> None:
    rows = make_rows()
    step = step_of(rows, StepPlan(0, 1, 2, admit=(admit(0, [1, 2], (1,)),), chunks=(Chunk(0, 2),)))
    rows.count_sampled(step.sample_rows)
    assert rows.history.num_tokens[0] == 3
    assert step_of(rows, StepPlan(1, 1, 1)).positions.tolist() == [2]
    assert rows.prompt_token_ids(0, 1, 1).tolist() == [2]
    with pytest.raises(AssertionError):
        rows.prompt_token_ids(0, 1, 2)


def test_table_edits() -> None:
    rows = make_rows(num_groups=2)
    tokens = list(range(40))
    plan = StepPlan(0, 1, 40, admit=(admit(3, tokens, (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)),))
    edits = (
        TableEdit(3, 0, EditKind.REPLACE, 1, (20, 21)),
        TableEdit(3, 1, EditKind.HOLE, 0, (HOLE_BLOCK, HOLE_BLOCK)),
        TableEdit(3, 0, EditKind.TRUNCATE, 4),
        TableEdit(3, 0, EditKind.APPEND, 4, (22,)),
    )
    plan = StepPlan(0, 1, 40, admit=plan.admit, table_edits=edits, chunks=(Chunk(3, 40),))
    rows.change(plan)
    groups = rows.build(plan).attention.groups
    assert groups[0].block_tables[3, :5].tolist() == [1, 20, 21, 4, 22]
    assert groups[1].block_tables[3, 2:5].tolist() == [8, 9, 10]
    assert groups[0].slot_mapping.tolist() == slots((1, 20, 21, 4, 22), range(40))


def test_the_block_tables_are_the_same_memory_every_step() -> None:
    rows = make_rows(num_groups=2)
    first = admit(4, list(range(30)), (5, 6, 7, 8), (15, 16, 17, 18), num_computed_tokens=29)
    plan = StepPlan(0, 1, 1, admit=(first,))
    rows.change(plan)
    step = rows.build(plan)
    before = [group.block_tables for group in step.attention.groups]
    rows.append_sampled(np.array([4]), np.array([1]))
    second = admit(0, list(range(9)), (9, 10), (19, 20), num_computed_tokens=8)
    edit = TableEdit(4, 0, EditKind.REPLACE, 3, (11,))
    plan = StepPlan(1, 2, 2, admit=(second,), table_edits=(edit,))
    rows.change(plan)
    step = rows.build(plan)
    after = [group.block_tables for group in step.attention.groups]
    assert [table.data_ptr() for table in after] == [table.data_ptr() for table in before]
    assert all(table.shape == (6, 8) and table.dtype is torch.int32 for table in before + after)
    assert step.attention.rows_list == [0, 4]
    assert before[0][4, :4].tolist() == [5, 6, 7, 11]
    assert before[1][step.attention.rows, :2].tolist() == [[19, 20], [15, 16]]


def test_a_cut_row_computes_again_what_was_cut() -> None:
    rows = make_rows()
    plan = StepPlan(0, 1, 20, admit=(admit(0, list(range(20)), (1, 2, 3)),), chunks=(Chunk(0, 20),))
    rows.change(plan)
    rows.build(plan)
    rows.append_sampled(np.array([0]), np.array([99]))
    edits = (TableEdit(0, 0, EditKind.TRUNCATE, 1), TableEdit(0, 0, EditKind.APPEND, 1, (7, 8)))
    plan = StepPlan(1, 1, 13, table_edits=edits, chunks=(Chunk(0, 13),))
    rows.change(plan)
    step = rows.build(plan)
    assert step.positions.tolist() == list(range(8, 21))
    assert step.token_ids.tolist() == [*range(8, 20), 99]
    assert step.attention.groups[0].slot_mapping.tolist() == slots((1, 7, 8), range(8, 21))
    assert step.sample_rows.tolist() == [0]


def test_a_released_row_can_be_admitted_again_in_the_same_plan() -> None:
    rows = make_rows()
    plan = StepPlan(0, 1, 2, admit=(admit(0, [1, 2], (3,)),), chunks=(Chunk(0, 2),))
    rows.change(plan)
    rows.build(plan)
    plan = StepPlan(
        1, 1, 3, release=(0,), admit=(admit(0, [7, 8, 9], (4,)),), chunks=(Chunk(0, 3),)
    )
    rows.change(plan)
    assert rows.build(plan).token_ids.tolist() == [7, 8, 9]


def test_prompt_logprob_spans_cover_each_prompt_token_but_the_first_once() -> None:
    rows = make_rows()
    prompt = list(range(50, 61))
    plan = StepPlan(
        0, 1, 4, admit=(admit(0, prompt, (1, 2), params=SCORED),), chunks=(Chunk(0, 4),)
    )
    rows.change(plan)
    spans = [rows.build(plan).prompt_logprob_spans]
    for size in (4, 3):
        plan = StepPlan(1, 1, size, chunks=(Chunk(0, size),))
        spans.append(rows.build(plan).prompt_logprob_spans)
    assert spans == [[(0, 0, 4, 1)], [(0, 0, 4, 5)], [(0, 0, 2, 9)]]
    rows.append_sampled(np.array([0]), np.array([5]))
    assert rows.build(StepPlan(2, 1, 1)).prompt_logprob_spans == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, 1, 1, release=(5,)), "row 5 is released but was not live"),
        (StepPlan(1, 2, 1, admit=(admit(0, [1], (1,)),)), "row 0 is admitted but was live"),
        (StepPlan(1, 3, 1), "1 live rows, but the plan has 3"),
        (StepPlan(1, 1, 9), "the plan has 9"),
        (StepPlan(1, 1, 5, chunks=(Chunk(0, 5),)), "beyond its tokens"),
        (
            StepPlan(1, 1, 1, table_edits=(TableEdit(0, 0, EditKind.APPEND, 3, (9,)),)),
            "does not append",
        ),
        (
            StepPlan(1, 1, 1, table_edits=(TableEdit(0, 0, EditKind.REPLACE, 1, (9,)),)),
            "goes beyond 1 blocks",
        ),
        (StepPlan(1, 1, 1, forks=(fork(0, 0),)), "row 0 is forked into but was live"),
        (StepPlan(1, 1, 1, forks=(fork(1, 3),)), "forked from row 3, which is not live"),
        (
            StepPlan(1, 2, 0, forks=(fork(1, 0, True),), chunks=(Chunk(0, 0),)),
            "row 1 joins row 0, which leaves its gap open",
        ),
        (
            StepPlan(1, 3, 1, forks=(fork(1, 0, True), fork(2, 1, True))),
            "row 2 joins row 1, which leaves its gap open",
        ),
        (
            StepPlan(1, 2, 2, forks=(fork(1, 0, True),), chunks=(Chunk(1, 1),)),
            "row 1 joins a step and computes a chunk",
        ),
        (
            StepPlan(1, 2, 1, forks=(fork(1, 0, True),), token_edits=(TokenEdit(1, 2, (5, 6)),)),
            "tokens are not its source's",
        ),
        (
            StepPlan(
                1,
                2,
                1,
                forks=(fork(1, 0, True),),
                table_edits=(TableEdit(1, 0, EditKind.TRUNCATE, 0),),
            ),
            "a table ends before the step does",
        ),
        (StepPlan(1, 1, 1, token_edits=(TokenEdit(1, 0, (5,)),)), "a row that is not live"),
        (StepPlan(1, 1, 1, token_edits=(TokenEdit(0, 1, (5, 6)),)), "does not begin in"),
        (StepPlan(1, 1, 1, token_edits=(TokenEdit(0, 4, (5,)),)), "does not begin in"),
        (StepPlan(1, 1, 1, token_edits=(TokenEdit(0, 2, ()),)), "leaves no token to compute"),
    ],
)
def test_a_plan_that_disagrees_with_the_rows_is_caught(plan: StepPlan, message: str) -> None:
    rows = make_rows()
    start = StepPlan(0, 1, 2, admit=(admit(0, [1, 2, 3], (3,)),), chunks=(Chunk(0, 2),))
    rows.change(start)
    rows.build(start)
    with pytest.raises(AssertionError, match=message):
        rows.change(plan)
        rows.build(plan)


def test_a_fork_takes_the_used_part_of_its_source_and_goes_on_alone() -> None:
    rows = make_rows(num_groups=2)
    start = admit(1, list(range(50, 61)), (1, 2), (11, 12), num_prompt_tokens=9)
    step_of(rows, StepPlan(0, 1, 11, admit=(start,), chunks=(Chunk(1, 11),)))
    rows.append_sampled(np.array([1]), np.array([61]))
    tables = [group.block_tables for group in rows.build(StepPlan(1, 1, 1)).attention.groups]
    rows.append_sampled(np.array([1]), np.array([62]))
    rows.token_ids[4], tables[0][4], tables[1][4] = 77, 78, 79
    plan = StepPlan(
        2,
        2,
        2,
        forks=(fork(4, 1),),
        token_edits=(TokenEdit(4, 12, (99,)),),
        table_edits=(TableEdit(4, 0, EditKind.REPLACE, 1, (5,)),),
    )
    step = step_of(rows, plan)
    assert step.rows.tolist() == step.sample_rows.tolist() == [1, 4]
    assert step.token_ids.tolist() == [62, 99]
    assert step.positions.tolist() == [12, 12]
    assert step.joined_lines.tolist() == []
    assert rows.num_prompt_tokens[[1, 4]].tolist() == [9, 9]
    slot_mappings = [group.slot_mapping.tolist() for group in step.attention.groups]
    assert slot_mappings == [[2 * 8 + 4, 5 * 8 + 4], [12 * 8 + 4] * 2]
    assert rows.token_ids[4].tolist() == [*range(50, 62), 99] + [77] * 52
    assert [table[4].tolist() for table in tables] == [[1, 5] + [78] * 6, [11, 12] + [79] * 6]


def test_rows_that_join_a_step_sample_from_their_sources_token() -> None:
    rows = make_rows()
    first, second = (9, 4), (3, 7)
    admissions = (
        admit(5, [11, 12, 13], first, num_computed_tokens=2),
        admit(1, list(range(20, 32)), second, num_computed_tokens=8, params=SCORED),
    )
    forks = (fork(0, 1, joins_step=True), fork(2, 5, joins_step=True), fork(3, 1, joins_step=True))
    step = step_of(rows, StepPlan(0, 5, 5, admit=admissions, forks=forks, chunks=(Chunk(1, 4),)))
    assert step.rows.tolist() == [5, 1]
    assert step.token_ids.tolist() == [13, 28, 29, 30, 31]
    assert step.attention.rows_list == [5, 1]
    assert step.sample_rows.tolist() == [5, 1, 0, 2, 3]
    assert step.sample_index.tolist() == [0, 4, 4, 0, 4]
    assert step.joined_lines.tolist() == [1, 0, 1]
    assert {row for row, *_ in step.prompt_logprob_spans} == {1}
    rows.append_sampled(step.sample_rows, np.array([60, 61, 62, 63, 64]))
    edits = (TableEdit(0, 0, EditKind.REPLACE, 1, (6,)), TableEdit(3, 0, EditKind.REPLACE, 1, (8,)))
    step = step_of(rows, StepPlan(1, 5, 5, table_edits=edits))
    assert step.rows.tolist() == step.sample_rows.tolist() == [0, 1, 2, 3, 5]
    assert step.token_ids.tolist() == [62, 61, 63, 64, 60]
    assert step.positions.tolist() == [12, 12, 3, 12, 3]
    blocks = [slot // BLOCK_SIZE for slot in step.attention.groups[0].slot_mapping.tolist()]
    assert blocks == [6, 7, 9, 8, 9]


def test_a_row_may_join_a_step_that_grows_the_table_when_its_own_grows_too() -> None:
    rows = make_rows()
    step_of(
        rows, StepPlan(0, 1, 8, admit=(admit(0, list(range(12)), (1,)),), chunks=(Chunk(0, 8),))
    )
    edits = tuple(TableEdit(row, 0, EditKind.APPEND, 1, (2,)) for row in (0, 3))
    plan = StepPlan(1, 2, 4, forks=(fork(3, 0, True),), table_edits=edits, chunks=(Chunk(0, 4),))
    step = step_of(rows, plan)
    assert step.sample_rows.tolist() == [0, 3]
    assert step.attention.groups[0].block_tables[3, :2].tolist() == [1, 2]


def test_a_fork_within_the_prompt_leaves_its_log_probabilities_to_the_source() -> None:
    rows = make_rows()
    start = admit(0, list(range(20, 30)), (1, 2), params=SCORED)
    step_of(rows, StepPlan(0, 1, 4, admit=(start,), chunks=(Chunk(0, 4),)))
    plan = StepPlan(1, 2, 8, forks=(fork(3, 0),), chunks=(Chunk(0, 4), Chunk(3, 4)))
    assert step_of(rows, plan).prompt_logprob_spans == [(0, 0, 4, 5)]


def test_token_edits_replace_the_tail() -> None:
    rows = make_rows()
    step_of(
        rows, StepPlan(0, 1, 4, admit=(admit(0, list(range(10)), (1, 2)),), chunks=(Chunk(0, 4),))
    )
    step = step_of(
        rows, StepPlan(1, 1, 2, token_edits=(TokenEdit(0, 6, ()),), chunks=(Chunk(0, 2),))
    )
    assert step.token_ids.tolist() == [4, 5]
    assert step.sample_rows.tolist() == [0]
    rows.append_sampled(np.array([0]), np.array([42]))
    plan = StepPlan(2, 1, 3, token_edits=(TokenEdit(0, 6, (7, 8, 9)),), chunks=(Chunk(0, 3),))
    assert step_of(rows, plan).token_ids.tolist() == [7, 8, 9]
    rows.append_sampled(np.array([0]), np.array([43]))
    assert step_of(rows, StepPlan(3, 1, 1, token_edits=(TokenEdit(0, 9, (5,)),))).token_ids[0] == 5


def test_a_token_that_was_computed_and_cut_off_is_not_edited() -> None:
    rows = make_rows()
    start = admit(0, list(range(12)), (1, 2))
    step_of(rows, StepPlan(0, 1, 12, admit=(start,), chunks=(Chunk(0, 12),)))
    rows.append_sampled(np.array([0]), np.array([42]))
    rows.change(StepPlan(1, 1, 0, table_edits=(TableEdit(0, 0, EditKind.TRUNCATE, 1),)))
    rows.change(StepPlan(2, 1, 0, token_edits=(TokenEdit(0, 12, (43,)),)))
    assert rows.token_ids[0, :13].tolist() == [*range(12), 43]
    with pytest.raises(AssertionError, match=r"does not begin in \[12, 13\]"):
        rows.change(StepPlan(3, 1, 0, token_edits=(TokenEdit(0, 11, (43, 44)),)))
    again = admit(0, list(range(12)), (1,), num_computed_tokens=8)
    rows.change(StepPlan(4, 1, 0, release=(0,), admit=(again,)))
    rows.change(StepPlan(5, 1, 0, token_edits=(TokenEdit(0, 11, (43, 44)),)))
    assert rows.token_ids[0, :13].tolist() == [*range(11), 43, 44]


def test_cutting_lookahead_blocks_leaves_the_computed_tokens() -> None:
    rows = make_rows()
    start = admit(0, list(range(11)), (1, 2, 3, 4))
    step_of(rows, StepPlan(0, 1, 11, admit=(start,), chunks=(Chunk(0, 11),)))
    rows.append_sampled(np.array([0]), np.array([42]))
    step = step_of(rows, StepPlan(1, 1, 1, table_edits=(TableEdit(0, 0, EditKind.TRUNCATE, 2),)))
    assert step.positions.tolist() == [11]
    assert step.token_ids.tolist() == [42]
    assert step.attention.groups[0].slot_mapping.tolist() == [2 * BLOCK_SIZE + 3]


def test_reset_drops_all_rows() -> None:
    rows = make_rows()
    plan = StepPlan(0, 1, 2, admit=(admit(0, [1, 2], (3,)),), chunks=(Chunk(0, 2),))
    rows.change(plan)
    rows.reset()
    rows.change(plan)  # row 0 is free again
    assert rows.build(plan).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_a_slow_model(seed: int) -> None:
    rng = random.Random(seed)
    rows, slow = make_rows(num_groups=2, num_rows=NUM_ROWS), SlowRows(rng)
    num_joined = 0
    for step_id in range(30):
        plan = slow.random_plan(step_id)
        step = step_of(rows, plan)
        sampled = slow.check(step)
        num_joined += len(step.joined_lines)
        new = [rng.randrange(1000) for _ in sampled]
        rows.append_sampled(step.sample_rows, np.array(new, np.int64))
        for row, token_id in zip(sampled, new, strict=True):
            slow.tokens[row].append(token_id)
    assert num_joined > 0
