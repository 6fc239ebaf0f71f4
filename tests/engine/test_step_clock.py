"""How long a step took, by hand-made clocks."""

import pytest

from quire.core.step import Chunk, StepPlan, StepResult
from quire.engine.step_clock import Landing, LaunchedStep, StepClock
from quire.observability.step_trace import StepTiming


def launched(step_id: int, began_s: float) -> LaunchedStep:
    plan = StepPlan(step_id, num_rows=1, num_tokens=1)
    return LaunchedStep(plan, began_s, 0.001, StepTiming(), num_waiting=2, num_preemptions=3)


def test_results_come_in_order_and_dropped_steps_bring_none() -> None:
    steps = StepClock()
    for step_id in range(3):
        steps.launch(launched(step_id, 0.0))
    assert [steps.pop_oldest().plan.step_id, len(steps)] == [0, 2]
    steps.drop()
    assert not steps


def test_a_step_alone_is_counted_from_its_planning() -> None:
    steps = StepClock()
    for began_s in (1.0, 5.0):
        steps.begin_call(began_s)
        steps.launch(launched(0, began_s))
        assert steps.end(steps.pop_oldest(), began_s + 0.5) == (0.5, True)
        steps.end_call(began_s + 0.5)


def test_a_step_that_was_launched_while_another_ran_is_counted_from_the_end_of_that() -> None:
    steps = StepClock()
    steps.begin_call(0.0)
    steps.launch(launched(0, 0.0))
    steps.end_call(0.1)
    steps.begin_call(0.1)
    steps.launch(launched(1, 0.1))
    assert steps.end(steps.pop_oldest(), 1.0) == (1.0, True)
    steps.end_call(1.0)
    steps.begin_call(1.25)  # while it runs the caller may do something
    assert steps.end(steps.pop_oldest(), 2.0) == (1.0, True)


def test_a_step_during_which_the_host_was_away_has_no_duration() -> None:
    steps = StepClock()
    steps.begin_call(0.0)
    steps.launch(launched(0, 0.0))
    steps.end_call(0.25)
    steps.begin_call(9.25)
    assert steps.end(steps.pop_oldest(), 9.5) == (0.5, False)
    steps.end_call(9.5)
    steps.begin_call(99.0)  # nothing ran meanwhile
    steps.launch(launched(1, 99.0))
    assert steps.end(steps.pop_oldest(), 99.5) == (0.5, True)


def test_a_record_has_all_that_was_noted_at_the_launch() -> None:
    step = LaunchedStep(
        StepPlan(7, num_rows=4, num_tokens=9), 0.0, 0.001, StepTiming(1.0, 2.0, 3.0, 4.0), 5, 6
    )
    landing = Landing(fetched_s=99.0, wait_s=7.0, busy_s=11.0, gap_s=12.0)
    record = step.record(landing, apply_s=8.0, elapsed_s=9.0, num_blocks_used=10)
    assert (record.step_id, record.num_rows, record.num_tokens) == (7, 4, 9)
    assert (record.build_s, record.plan_s, record.forward_s, record.sample_s) == (1, 2, 3, 4)
    assert (record.num_waiting, record.num_preemptions, record.wait_s) == (5, 6, 7)
    assert (record.apply_s, record.elapsed_s, record.num_blocks_used) == (8, 9, 10)
    assert record.schedule_s == pytest.approx(0.001) and record.num_prefill_tokens == 0
    assert (record.busy_s, record.gap_s) == (11, 12)
    assert step.launched_s == pytest.approx(1.001)


def test_drafts_are_counted_and_are_no_prompts() -> None:
    chunks = (Chunk(0, 4, (7, 8, 9)), Chunk(1, 3, (7, 8)), Chunk(2, 0), Chunk(3, 16))
    plan = StepPlan(7, num_rows=5, num_tokens=24, chunks=chunks)
    step = LaunchedStep(plan, 0.0, 0.001, StepTiming(), 0, 0)
    result = StepResult(7, (0, 3, 4), ((7, 8, 1), (5,), ()))  # row 1 failed, row 4 pools
    assert step.count_drafts(result) == (2, 3)
    landing = Landing(fetched_s=1.0, wait_s=0.0, busy_s=0.0, gap_s=0.0)
    record = step.record(landing, apply_s=0.0, elapsed_s=0.0, num_blocks_used=1)
    assert record.num_prefill_tokens == 16
    assert launched(0, 0.0).count_drafts(result) == (0, 0)
