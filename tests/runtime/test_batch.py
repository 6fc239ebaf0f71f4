"""RowBatch against a slow model of the same rows, and each kind of table edit."""

import random

import numpy as np
import pytest
import torch

from quire.core.sampling_params import DecodingParams
from quire.core.step import HOLE_BLOCK, Chunk, EditKind, RowAdmission, StepPlan, TableEdit
from quire.runtime.batch import RowBatch

GREEDY = DecodingParams(max_tokens=8, temperature=0.0)
SCORED = DecodingParams(max_tokens=8, prompt_logprobs=1)
BLOCK_SIZE = 8


def make_rows(num_groups: int = 1, num_rows: int = 6) -> RowBatch:
    return RowBatch(
        num_rows=num_rows,
        max_model_len=64,
        max_num_tokens=64,
        num_groups=num_groups,
        block_size=BLOCK_SIZE,
    )


def admit(row: int, token_ids: list[int], *tables: tuple[int, ...], **fields) -> RowAdmission:
    given = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "params": GREEDY}
    return RowAdmission(row, token_ids, block_tables=tables, **(given | fields))


def slots(table: tuple[int, ...], positions: range) -> list[int]:
    return [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]


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


def test_table_edits() -> None:
    rows = make_rows(num_groups=2)
    tokens = list(range(40))
    plan = StepPlan(0, 1, 40, admit=(admit(3, tokens, (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)),))
    edits = (
        TableEdit(3, 0, EditKind.REPLACE, 1, (20, 21)),
        TableEdit(3, 1, EditKind.HOLE, 0, (HOLE_BLOCK, HOLE_BLOCK)),
        TableEdit(3, 0, EditKind.CUT, 4),
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
    edits = (TableEdit(0, 0, EditKind.CUT, 1), TableEdit(0, 0, EditKind.APPEND, 1, (7, 8)))
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
    rows = make_rows(num_groups=2, num_rows=8)
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[tuple[int, ...]]] = {}
    computed: dict[int, int] = {}
    for step_id in range(30):
        release = tuple(row for row in tokens if rng.random() < 0.2)
        for row in release:
            del tokens[row], tables[row], computed[row]
        admissions = []
        for row in set(range(8)) - set(tokens):
            if rng.random() < 0.4:
                tokens[row] = [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
                tables[row] = [tuple(rng.randrange(100) for _ in range(8)) for _ in range(2)]
                computed[row] = rng.randrange(len(tokens[row]))
                admissions.append(
                    admit(row, tokens[row], *tables[row], num_computed_tokens=computed[row])
                )
        counts = {row: rng.randrange(0, len(tokens[row]) - computed[row] + 1) for row in tokens}
        plan = StepPlan(
            step_id,
            len(tokens),
            sum(counts.values()),
            release,
            tuple(admissions),
            chunks=tuple(Chunk(row, count) for row, count in counts.items() if count != 1),
        )
        rows.change(plan)
        step = rows.build(plan)
        start, sampled = 0, []
        assert set(step.rows.tolist()) == {row for row, count in counts.items() if count}
        at_rows = step.attention.rows
        assert step.rows.tolist() == at_rows.tolist() == step.attention.rows_list
        for number, group in enumerate(step.attention.groups):
            expected = [list(tables[row][number]) for row in step.rows.tolist()]
            assert group.block_tables[at_rows].tolist() == expected
        for row in step.rows.tolist():
            positions = range(computed[row], computed[row] + counts[row])
            span = slice(start, start + len(positions))
            assert step.positions[span].tolist() == list(positions)
            assert step.token_ids[span].tolist() == [tokens[row][at] for at in positions]
            for group, table in zip(step.attention.groups, tables[row], strict=True):
                assert group.slot_mapping[span].tolist() == slots(table, positions)
            start += len(positions)
            computed[row] = positions.stop
            if positions.stop == len(tokens[row]):
                sampled.append((row, start - 1))
        assert list(zip(step.sample_rows.tolist(), step.sample_index.tolist(), strict=True)) == (
            sampled
        )
        new = [rng.randrange(1000) for _ in sampled]
        rows.append_sampled(step.sample_rows, np.array(new, np.int64))
        for (row, _), token_id in zip(sampled, new, strict=True):
            tokens[row].append(token_id)
