"""RowBatch with groups of states: what their tables may do, and what joining rows need."""

import pytest
from tests.runtime.slow_rows import BLOCK_SIZE, admit, fork
from tests.runtime.test_batch import step_of

from quire.core.step import Chunk, EditKind, StepPlan, TableEdit
from quire.runtime.batch import RowBatch


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
