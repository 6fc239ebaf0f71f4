"""RowBatch with groups of states: what their tables may do, and what joining rows need."""

import numpy as np
import pytest
from tests.runtime.device_path import LINK
from tests.runtime.slow_rows import BLOCK_SIZE, admit, fork
from tests.runtime.test_batch import step_of

from quire.core.step import Chunk, EditKind, StepPlan, TableEdit
from quire.runtime.batch import RowBatch
from quire.runtime.device_rows import DeviceRows
from quire.sampling.host.sampler import SampledTokens


def hybrid_rows() -> RowBatch:
    """One group of tokens, and one of states of two blocks."""
    return RowBatch(
        num_rows=4,
        max_model_len=64,
        max_num_tokens=64,
        num_groups=1,
        block_size=BLOCK_SIZE,
        state_sizes=(2,),
    )


def test_a_row_joins_a_step_with_the_states_that_the_step_writes() -> None:
    """It goes on from the state after the step, so it must name the very blocks."""
    rows = hybrid_rows()
    plan = StepPlan(
        0,
        2,
        3,
        admit=(admit(0, [1, 2, 3], (3,), (8, 9)),),
        forks=(fork(1, 0, True),),
        chunks=(Chunk(0, 3),),
    )
    step = step_of(rows, plan)
    assert len(step.attention.groups) == 1
    assert step.sample_rows.tolist() == [0, 1]
    assert rows.tables.have_same_states(1, 0)
    copied = StepPlan(
        0,
        2,
        3,
        admit=plan.admit,
        forks=plan.forks,
        chunks=plan.chunks,
        table_edits=(TableEdit(1, 1, EditKind.REPLACE, 0, (10, 11)),),
    )
    with pytest.raises(AssertionError, match="row 1 joins row 0 without its states"):
        step_of(hybrid_rows(), copied)


@pytest.mark.parametrize("kind", [EditKind.APPEND, EditKind.TRUNCATE, EditKind.HOLE])
def test_the_blocks_of_a_state_are_only_replaced(kind: EditKind) -> None:
    rows = hybrid_rows()
    rows.change(StepPlan(0, 1, 1, admit=(admit(0, [1, 2, 3], (3,), (8, 9)),)))
    with pytest.raises(AssertionError, match="is for the blocks of a state"):
        rows.change(StepPlan(1, 1, 1, table_edits=(TableEdit(0, 1, kind, 2, (5,)),)))


@pytest.mark.parametrize("static_sizes", [(), (2,)])
def test_rows_on_a_device_have_the_tables_of_states_too(static_sizes: tuple[int, ...]) -> None:
    """Also those of a step that is captured with padding, whose contexts say so."""
    rows = DeviceRows(hybrid_rows(), LINK, static_sizes)
    admitted = admit(1, [1, 2, 3], (3,), (8, 9), num_computed_tokens=2)
    edit = TableEdit(1, 1, EditKind.REPLACE, 0, (10, 11))
    for plan, expected in (
        (StepPlan(0, 1, 1, admit=(admitted,)), [8, 9]),
        (StepPlan(1, 1, 1, table_edits=(edit,)), [10, 11]),
    ):
        rows.change(plan)
        states = rows.build(plan).states
        assert [table[1, :2].tolist() for table in states.tables] == [expected]
        context = 3 + plan.step_id
        assert states.context_lens.tolist() == [context] + [0] * (len(static_sizes))
        assert (states.query_lens_list, states.rows_list) == ([1], [1])
        assert states.context_lens_list == [context] and states.num_decodes == 1
        rows.store_sampled(np.array([1]), SampledTokens(np.array([7]), {}, {}))


def test_states_see_a_step_as_attention_does() -> None:
    """A decode, whose context is longer than its one token, and a chunk that begins with zeros."""
    plan = StepPlan(
        0,
        2,
        3,
        admit=(
            admit(0, [1, 2, 3], (3,), (8, 9), num_computed_tokens=2),
            admit(2, [4, 5], (4,), (6, 7)),
        ),
        chunks=(Chunk(2, 2),),
    )
    rows = hybrid_rows()
    step = step_of(rows, plan)
    states = step.states
    assert (states.query_lens_list, states.context_lens_list) == ([1, 2], [3, 2])
    assert states.rows.tolist() == states.rows_list == [0, 2] and states.num_decodes == 1
    (table,) = states.tables
    assert table[states.rows, :2].tolist() == [[8, 9], [6, 7]]
    rows.append_sampled(step.sample_rows, np.array([5, 6]))
    for context in ([4, 3], [5, 4]):  # the same buffers, step after step
        states = step_of(rows, StepPlan(1, 2, 2)).states
        assert states.context_lens_list == states.context_lens.tolist() == context
        rows.append_sampled(np.array([0, 2]), np.array([5, 6]))
