"""Which changes of rows and tables the next plan carries."""

from tests.core.test_sequence import make

from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, Chunk, EditKind, StepPlan, TableEdit, TokenEdit


def in_row(row: int) -> Sequence:
    sequence = make()
    sequence.row, sequence.block_tables = row, ([4, 5], [6, 7])
    return sequence


def append(row: int, block: int) -> TableEdit:
    return TableEdit(row, 0, EditKind.APPEND, 2, (block,))


def test_a_plan_takes_all_along_and_leaves_nothing() -> None:
    draft = PlanBuilder()
    draft.release(3)
    draft.admit(in_row(1))
    draft.fork(in_row(2), in_row(0), joins_step=False)
    draft.token_edits.append(TokenEdit(0, 5, (9,)))
    draft.table_edits.append(append(0, 8))
    draft.copy([BlockCopy(1, 2)])
    plan = draft.build(7, 3, 12, (Chunk(1, 10),))
    assert (plan.step_id, plan.num_rows, plan.num_tokens, plan.release) == (7, 3, 12, (3,))
    assert [admission.block_tables for admission in plan.admit] == [((4, 5), (6, 7))]
    assert [(fork.row, fork.source_row, fork.joins_step) for fork in plan.forks] == [(2, 0, False)]
    assert plan.token_edits == (TokenEdit(0, 5, (9,)),)
    assert (plan.table_edits, plan.chunks) == ((append(0, 8),), (Chunk(1, 10),))
    assert plan.copies == (BlockCopy(1, 2),)
    assert draft.build(8, 0, 0, ()) == StepPlan(8, 0, 0)


def test_an_admission_has_the_tables_as_they_were_then() -> None:
    draft, sequence = PlanBuilder(), in_row(1)
    draft.admit(sequence)
    sequence.block_tables[0].append(9)
    assert draft.build(0, 1, 1, ()).admit[0].block_tables == ((4, 5), (6, 7))


def test_a_fork_gets_the_edits_that_its_parent_got_before_and_none_after() -> None:
    draft, parent = PlanBuilder(), in_row(0)
    draft.table_edits += [append(0, 8), append(5, 7)]
    draft.fork(in_row(2), parent, joins_step=True)
    draft.table_edits.append(append(0, 9))
    edits = draft.build(0, 2, 1, ()).table_edits
    assert [(edit.row, edit.block_ids) for edit in edits] == [
        (0, (8,)),
        (5, (7,)),
        (2, (8,)),
        (0, (9,)),
    ]


def test_a_released_row_drops_its_unsent_edits() -> None:
    draft = PlanBuilder()
    draft.table_edits += [append(0, 8), append(1, 9)]
    draft.token_edits += [TokenEdit(0, 5, (9,)), TokenEdit(1, 5, (9,))]
    draft.release(0)
    plan = draft.build(0, 1, 1, ())
    assert plan.release == (0,)
    assert (plan.table_edits, plan.token_edits) == ((append(1, 9),), (TokenEdit(1, 5, (9,)),))


def test_a_row_that_the_runner_never_knew_is_not_released() -> None:
    draft = PlanBuilder()
    draft.fork(in_row(2), in_row(0), joins_step=False)
    draft.release(2)
    assert draft.build(0, 1, 1, ()) == StepPlan(0, 1, 1)


def test_a_row_whose_former_owner_it_knew_is() -> None:
    draft = PlanBuilder()
    draft.release(2)
    draft.fork(in_row(2), in_row(0), joins_step=False)
    draft.release(2)
    assert draft.build(0, 1, 1, ()) == StepPlan(0, 1, 1, release=(2,))


def test_chained_copies_read_from_the_original_block() -> None:
    draft = PlanBuilder()
    draft.copy([BlockCopy(1, 2), BlockCopy(3, 4)])
    draft.copy([BlockCopy(2, 5)])
    draft.copy([BlockCopy(5, 6)])
    assert draft.copies == [BlockCopy(1, 2), BlockCopy(3, 4), BlockCopy(1, 5), BlockCopy(1, 6)]


def test_a_target_counts_for_its_last_taker() -> None:
    draft = PlanBuilder()
    draft.copy([BlockCopy(1, 2)])
    draft.copy([BlockCopy(7, 2)])
    assert draft.copies == [BlockCopy(7, 2)]
