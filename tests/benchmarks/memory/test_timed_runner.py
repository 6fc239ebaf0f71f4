"""The model's runner on a virtual clock: everything passed on, each row's context and copy paid."""

import pytest
from benchmarks.memory.step_cost import StepCost
from benchmarks.memory.timed_runner import TimedRunner
from tests.benchmarks.memory.test_step_cost import PARAMS, admission

from quire.core.step import (
    BlockCopy,
    Chunk,
    RowFork,
    Runner,
    StepPlan,
    StepResult,
    TokenMasks,
)
from quire.simulation.virtual_engine import VirtualClock

COST = StepCost(base_s=1.0, token_s=0.1, context_token_s=0.001)
BLOCK_SIZE = 16


class Recorder:
    """A runner that only notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def execute(self, plan: StepPlan) -> None:
        self.calls.append(plan)

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.calls.append(masks)

    def result(self) -> StepResult:
        return StepResult(4, [2], [(7,)])

    def reset(self) -> None:
        self.calls.append("reset")


def test_forks_read_their_own_context_and_copies_are_read_and_written() -> None:
    inner, clock = Recorder(), VirtualClock()
    runner: Runner = TimedRunner(inner, COST, clock, BLOCK_SIZE)
    runner.execute(StepPlan(0, 1, 5, admit=(admission(0, 5),), chunks=(Chunk(0, 5),)))
    assert clock() == pytest.approx(1.0 + 0.5 + 0.001 * 5)
    forks = (RowFork(1, 0, PARAMS, 1), RowFork(2, 0, PARAMS, 2))
    copies = (BlockCopy(3, 4), BlockCopy(3, 5))
    plan = StepPlan(1, 3, 2, forks=forks, chunks=(Chunk(2, 0),), copies=copies)
    before_s = clock()
    runner.execute(plan)
    copied_tokens = 2 * 2 * BLOCK_SIZE
    assert clock() - before_s == pytest.approx(1.0 + 0.2 + 0.001 * (6 + 6 + copied_tokens))
    before_s = clock()
    runner.execute(StepPlan(2, 2, 2, release=(0,)))
    assert clock() - before_s == pytest.approx(1.0 + 0.2 + 0.001 * (7 + 6))
    assert inner.calls[1] is plan and len(inner.calls) == 3


def test_all_calls_reach_the_runner_inside() -> None:
    inner = Recorder()
    runner = TimedRunner(inner, COST, VirtualClock(), BLOCK_SIZE)
    masks: TokenMasks = {0: b"\x01"}
    runner.sample(masks)
    assert runner.result().token_ids == [(7,)] and runner.num_sampled_rows == 1
    runner.execute(StepPlan(0, 1, 3, admit=(admission(0, 3),), chunks=(Chunk(0, 3),)))
    runner.reset()
    runner.execute(StepPlan(1, 1, 3, admit=(admission(0, 3),), chunks=(Chunk(0, 3),)))
    assert inner.calls[0] is masks and inner.calls[2] == "reset"
    assert runner.num_copied_blocks == 0
