"""Throughput under saturation: how static batches are formed, and what runs beside what."""

import pytest

from quire.bench.claims.saturated import serve_static, static_batches
from quire.bench.memory.length_runner import StepCost
from quire.bench.memory.load import Budget
from quire.bench.memory.study import ProcessorClock, simulated_engine
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


def test_a_batch_runs_until_its_longest_output_is_done() -> None:
    engine, clock = simulated_engine("contiguous_oracle", 64, BUDGET, cost=COST)
    batches = [make_requests((4, 1), (4, 5)), make_requests((4, 2))]
    found = serve_static(engine, batches, clock)
    seconds = (1.0 + 0.5 * 8) + 4 * 1.5 + (1.0 + 0.5 * 4) + 1.5
    assert clock() == pytest.approx(seconds)
    assert found.tokens_per_s == pytest.approx(8 / seconds)
    assert found.mean_width == 1.5


def test_a_processor_clock_can_not_sleep() -> None:
    clock = ProcessorClock()
    clock.wait_until(0.0)
    assert 0 <= clock() <= clock()
    with pytest.raises(AssertionError, match="no processor time"):
        clock.wait_until(clock() + 60)
