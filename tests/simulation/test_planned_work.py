"""The work of planned steps: equal to what simulated plans compute, step by step."""

from dataclasses import replace

import pytest

from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepLoad
from quire.core.step import (
    HOLE_BLOCK,
    Chunk,
    EditKind,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
)
from quire.simulation.planned_work import PlannedWorkCounter
from quire.simulation.simulator import Simulator, run_simulator
from quire.simulation.worlds import draw_world

PARAMS = DecodingParams(max_tokens=9)


class WatchedSimulator(Simulator):
    """Reads all plans on their way. `Simulator.on_plan` asserts that its tokens are the plan's."""

    def _start_engine(self) -> None:
        super()._start_engine()
        self.counter = PlannedWorkCounter(self.config.block_size)

    def on_plan(self, plan: StepPlan) -> float:
        work = self.counter.count(plan)
        assert work.load.num_decodes <= plan.num_rows
        assert len(set(work.sampled)) == len(work.sampled)
        entries = [
            block
            for row in self.counter._rows.live.values()
            for block in row.tables[0]
            if block != HOLE_BLOCK
        ]
        assert self.counter._rows.num_common[0] == len(entries) - len(set(entries))
        assert work.num_read <= work.load.num_decode_pairs
        return super().on_plan(plan)


@pytest.mark.parametrize("index", range(6))
def test_tokens_are_those_of_the_plan_whatever_happens(index: int) -> None:
    world = replace(
        draw_world(5, index, num_steps=120, check_every=50),
        step_failure_rate=0.0,
        poison_rate=0.0,
        interrupt_rate=0.0,
        tier=(),
    )
    assert run_simulator(WatchedSimulator(world)).num_steps >= 120


def admitted(row: int, num_tokens: int, num_computed: int = 0) -> RowAdmission:
    return RowAdmission(row, [1] * num_tokens, num_tokens, num_computed, ((row,),), PARAMS)


def test_chunks_decodes_and_pauses_are_told_apart() -> None:
    counter = PlannedWorkCounter(16)
    first = counter.count(
        StepPlan(0, 2, 5 + 1, admit=(admitted(0, 9), admitted(1, 4, 3)), chunks=(Chunk(0, 5),))
    )
    assert first.load == StepLoad(1, 4).with_chunk(0, 5)  # row 1 has one token left: it decodes
    assert (first.sampled, first.num_admissions, first.num_admitted_tokens) == ((1,), 2, 13)
    second = counter.count(StepPlan(1, 2, 4 + 1, chunks=(Chunk(0, 4),)))
    assert second.load == StepLoad(1, 5).with_chunk(5, 4)
    assert (second.sampled, second.longest) == ((0, 1), 9)
    third = counter.count(StepPlan(2, 2, 1, chunks=(Chunk(0, 0),)))
    assert (third.load, third.sampled) == (StepLoad(1, 6), (1,))


def test_a_fork_that_joins_computes_nothing_and_samples() -> None:
    counter = PlannedWorkCounter(16)
    fork = RowFork(1, 0, PARAMS, 1, joins_step=True)
    work = counter.count(
        StepPlan(0, 2, 3, admit=(admitted(0, 3),), forks=(fork,), chunks=(Chunk(0, 3),))
    )
    assert (work.load, work.sampled) == (StepLoad().with_chunk(0, 3), (0, 1))
    assert counter.count(StepPlan(1, 2, 2)).load == StepLoad(2, 8)


def test_a_cut_table_cuts_the_computed_tokens() -> None:
    counter = PlannedWorkCounter(4)
    counter.count(StepPlan(0, 1, 9, admit=(admitted(0, 9),), chunks=(Chunk(0, 9),)))
    edit = TableEdit(0, 0, EditKind.TRUNCATE, 1)
    work = counter.count(StepPlan(1, 1, 6, table_edits=(edit,), chunks=(Chunk(0, 6),)))
    assert work.load == StepLoad().with_chunk(4, 6)
    assert work.sampled == (0,)


def test_blocks_shared_by_rows_are_read_once() -> None:
    counter = PlannedWorkCounter(4)
    sharing = [RowAdmission(row, [1] * 9, 9, 8, ((7, 8, 10 + row),), PARAMS) for row in range(3)]
    assert counter.count(StepPlan(0, 3, 3, admit=tuple(sharing))).num_read == 27 - 2 * 8
    copied = TableEdit(2, 0, EditKind.REPLACE, 1, (5,))
    assert counter.count(StepPlan(1, 3, 3, table_edits=(copied,))).num_read == 30 - 3 * 4
    hole = TableEdit(2, 0, EditKind.HOLE, 0, (HOLE_BLOCK,))
    assert counter.count(StepPlan(2, 3, 3, table_edits=(hole,))).num_read == 33 - 2 * 4
    assert counter.count(StepPlan(3, 2, 2, release=(0,))).num_read == 24


def test_caches_are_cold_after_prompts_and_grow_warm_again() -> None:
    counter = PlannedWorkCounter(16)
    plans = [StepPlan(0, 1, 100, admit=(admitted(0, 200),), chunks=(Chunk(0, 100),))]
    plans += [StepPlan(1, 1, 100, chunks=(Chunk(0, 100),))]
    plans += [StepPlan(step, 1, 1) for step in range(2, 14)]
    first, second, *others, last = [counter.count(plan).coldness for plan in plans]
    assert first == 0 and 0.3 < second < 0.5
    assert others[:4] == pytest.approx([second / 3**step for step in range(4)])
    assert last == 0, "so that a later prompt counts as the first again"


def test_longer_prompts_leave_less_up_to_all() -> None:
    def after(num_tokens: int) -> float:
        counter = PlannedWorkCounter(16)
        chunk = (Chunk(0, num_tokens),)
        counter.count(StepPlan(0, 1, num_tokens, admit=(admitted(0, num_tokens),), chunks=chunk))
        return counter.count(StepPlan(1, 1, 1)).coldness

    found = [after(count) for count in (1, 30, 300, 1024, 3000)]
    assert 0 < found[0] < 0.02 and found == sorted(found) and found[3:] == [1.0, 1.0]


def test_blocks_and_releases_are_counted() -> None:
    counter = PlannedWorkCounter(4)
    counter.count(StepPlan(0, 1, 1, admit=(admitted(0, 1),)))
    append = TableEdit(0, 0, EditKind.APPEND, 1, (7, 8))
    work = counter.count(StepPlan(1, 1, 1, table_edits=(append,)))
    assert (work.num_new_blocks, work.num_releases) == (2, 0)
    work = counter.count(StepPlan(2, 1, 1, release=(0,), admit=(admitted(0, 1),)))
    assert (work.num_new_blocks, work.num_releases) == (1, 1)
    counter.reset()
    assert counter.count(StepPlan(3, 1, 1, admit=(admitted(0, 1),))).load == StepLoad(1, 1)


def test_a_plan_that_contradicts_the_rows_is_refused() -> None:
    counter = PlannedWorkCounter(4)
    counter.count(StepPlan(0, 1, 3, admit=(admitted(0, 3),), chunks=(Chunk(0, 3),)))
    with pytest.raises(AssertionError, match="release of row 1, which is not live") as caught:
        counter.count(StepPlan(1, 0, 0, release=(1,)))
    assert str(caught.value).splitlines()[1:] == [
        "the last plans, for row 1:",
        "  step 0: 1 rows, 3 tokens",
        "  step 1: 0 rows, 0 tokens; release 1",
    ]
    with pytest.raises(AssertionError, match="1 tokens to compute, the plan says 2"):
        counter.count(StepPlan(2, 1, 2))


def test_a_row_whose_drafts_have_no_result_is_refused() -> None:
    counter = PlannedWorkCounter(4)
    counter.count(StepPlan(0, 1, 3, admit=(admitted(0, 3),), chunks=(Chunk(0, 3),)))
    work = counter.count(StepPlan(1, 1, 3, chunks=(Chunk(0, 3, (8, 9)),)))
    assert (work.load, work.sampled) == (StepLoad().with_chunk(3, 3), (0,))
    with pytest.raises(AssertionError, match="row 0 computes while its drafts are in flight"):
        counter.count(StepPlan(2, 1, 1))
