"""Throughput under saturation: how static batches are formed, and what runs beside what."""

import math

import pytest
from benchmarks.claims.saturated import Run, static_batches, take_turns
from benchmarks.memory.load import Budget
from benchmarks.memory.step_cost import StepCost
from benchmarks.memory.study import ProcessorClock, simulated_engine

from quire.bench.workload import BenchRequest

COST = StepCost(base_s=1.0, token_s=0.5, context_token_s=0.0)
BUDGET = Budget(num_slots=64, block_size=8, max_num_seqs=8)


def make_requests(*lengths: tuple[int, int]) -> list[BenchRequest]:
    return [
        BenchRequest(index, [5] * prompt_len, output_len)
        for index, (prompt_len, output_len) in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("longest", "max_num_seqs", "expected"),
    [
        (32, 8, [[0, 1], [2, 3]]),  # 4 blocks each, of 8
        (None, 8, [[0, 1, 2]]),  # 2, 3 and 3 blocks; then 3 and 1, which are not full
        (None, 2, [[0, 1], [2, 3]]),
    ],
)
def test_a_batch_is_as_wide_as_memory_and_rows_allow(
    longest: int | None, max_num_seqs: int, expected: list[list[int]]
) -> None:
    requests = make_requests((8, 8), (8, 16), (16, 8), (8, 16), (4, 4))
    budget = Budget(BUDGET.num_slots, BUDGET.block_size, max_num_seqs)
    found = list(static_batches(requests, budget, longest))
    assert [[request.index for request in batch] for batch in found] == expected


def make_run(batches: list[list[BenchRequest]], *, is_static: bool) -> Run:
    engine, clock = simulated_engine("contiguous_oracle", 64, BUDGET, cost=COST)
    return Run(engine, clock, batches, is_static=is_static)


def test_a_static_batch_runs_until_its_longest_output_is_done() -> None:
    run = make_run([make_requests((4, 1), (4, 5)), make_requests((4, 2))], is_static=True)
    take_turns([run], math.inf)
    use = run.meter.use()
    assert run.is_done and use.is_steady
    assert use.measured_s == pytest.approx((1.0 + 0.5 * 8) + 4 * 1.5 + (1.0 + 0.5 * 4) + 1.5)
    assert use.output_tokens_per_s == pytest.approx(8 / use.measured_s)


def test_continuous_batches_are_measured_while_requests_wait() -> None:
    """8 blocks: 4 requests of 2 at once, of 6; the others enter with the end of the first two."""
    requests = make_requests((8, 2), (8, 2), *[(8, 8)] * 4)
    run = make_run([requests], is_static=False)
    take_turns([run], math.inf)
    use = run.meter.use()
    assert run.is_done and use.mean_running <= 4
    assert use.most_running == 4


def test_runs_take_turns_until_the_first_is_done() -> None:
    short = make_run([make_requests((4, 6))], is_static=True)
    others = [make_run([make_requests((4, 60))], is_static=True) for _ in range(2)]
    take_turns([short, *others], 3.0)  # its steps: 3.0 s, then 1.5 s each
    assert short.is_done and not any(run.is_done for run in others)
    assert [run.meter.use().measured_s for run in others] == [12.0, 12.0]


def test_a_processor_clock_can_not_sleep() -> None:
    clock = ProcessorClock()
    clock.wait_until(0.0)
    assert 0 <= clock() <= clock()
    with pytest.raises(AssertionError, match="no processor time"):
        clock.wait_until(clock() + 60)
