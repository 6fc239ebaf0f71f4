"""The scheduler over contiguous runs: the same tokens, nothing shared, and who fits comes in."""

import random

import pytest
from tests.core.harness import MAX_MODEL_LEN, Harness, hash_name, launch, make_groups

from quire.bench.baselines.contiguous import RESERVATIONS, ContiguousKVCacheManager
from quire.bench.baselines.run_allocators import PLACEMENTS
from quire.core.memory.kv_cache_manager import KVCacheConfig
from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import POLICIES
from quire.core.sequence import SequenceState
from quire.errors import InvalidRequestError
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import Faults

BLOCK_SIZE = 16


def make_memory(
    reservation: str = "oracle", placement: str = "first_fit", num_blocks: int = 80
) -> ContiguousKVCacheManager:
    config = KVCacheConfig(make_groups(1), num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    return ContiguousKVCacheManager(config, reservation, MAX_MODEL_LEN, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_a_crowd_gets_its_tokens_and_all_comes_back(reservation: str, placement: str) -> None:
    memory = make_memory(reservation, placement)
    harness = Harness(memory, max_num_seqs=6, budget=64, model=FakeModel(end_rate=0.02))
    chance = random.Random(5)
    for index in range(20):
        name = f"r{index}"
        params = DecodingParams(chance.randint(1, 120), end_token_ids=(0,), seed=hash_name(name))
        harness.add_branches(name, chance.randint(1, 90), n=chance.choice((1, 1, 3)), params=params)
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    assert memory._line.num_free == memory.pool.num_free == 80


def test_failed_steps_cost_runs_but_no_tokens() -> None:
    faults = Faults(step_failure_rate=0.1, seed=3)
    harness = Harness(make_memory(), max_num_seqs=4, faults=faults)
    for index in range(8):
        harness.add(f"r{index}", 20 + 9 * index, 30)
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions > 0
    assert harness.memory.pool.num_free == 80


def test_with_steps_in_flight_a_run_is_not_reused_too_early() -> None:
    harness = Harness(make_memory(num_blocks=36), max_num_seqs=4, budget=64)
    sequences = [harness.add(f"r{index}", 40 + index, 12) for index in range(12)]
    harness.launch()
    held = harness.memory.pool.num_held
    harness.scheduler.abort(sequences[0])
    harness.check()
    assert harness.memory.pool.num_held == held
    while harness.scheduler.has_unfinished:
        plan = harness.scheduler.schedule(0.0)
        harness.check()
        if plan is not None:
            launch(harness.runner, plan)
        if plan is None or harness.scheduler.num_steps_in_flight == 2:
            harness.land()
    harness.run()
    assert harness.memory.pool.num_free == 36


def test_all_that_fit_run_at_once() -> None:
    """Nothing is kept back for growth: 5 runs of 7 blocks into 35."""
    harness = Harness(make_memory(num_blocks=35), max_num_seqs=8, budget=512)
    for index in range(6):
        harness.add(f"r{index}", 64, 48)
    harness.step()
    assert len(harness.scheduler.running) == 5 and harness.memory.pool.num_free == 0
    assert [sequence.request_id for sequence in harness.scheduler.waiting] == ["r5"]
    harness.run()


def test_a_sequence_without_a_large_enough_hole_is_admitted_once_there_is_one() -> None:
    harness = Harness(make_memory(num_blocks=32), max_num_seqs=8, budget=512)
    for index, max_tokens in enumerate((2, 60, 2, 60)):
        harness.add(f"r{index}", 64, max_tokens)  # 5, 8, 5 and 8 blocks
    harness.step()
    long = harness.add("long", 100, 28)  # 8 blocks; there are holes of 6, then 5, 5 and 6
    harness.step()
    harness.step()
    assert harness.memory.is_fragmented_for(long)
    assert long.state is SequenceState.WAITING
    harness.run()


def test_branches_share_nothing() -> None:
    harness = Harness(make_memory(), max_num_seqs=4, budget=512)
    branches = harness.add_branches("r", 64, 8, n=3)
    harness.step()
    blocks = [block for sequence in branches for block in sequence.block_tables[0]]
    assert len(blocks) == len(set(blocks)) == 3 * 5
    harness.run()


def test_beams_are_refused_by_name() -> None:
    harness = Harness(make_memory(), max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="KV allocator shares no blocks"):
        harness.add("r", 10, params=DecodingParams(5, beam_width=2))


def test_memory_that_shares_nothing_forks_nothing() -> None:
    harness = Harness(make_memory(), max_num_seqs=4)
    parent = harness.add("a", 6, 12)
    harness.step()
    with pytest.raises(InvalidRequestError, match="shares no blocks, so nothing can fork"):
        harness.scheduler.fork(parent, 1, parent.params)


def test_a_better_rank_waits_for_its_turn_but_comes_first() -> None:
    memory = make_memory("max", num_blocks=64)
    harness = Harness(memory, max_num_seqs=4, policy=POLICIES.make("priority"))
    for name, priority in (("a", 0), ("b", 0), ("late", 5), ("urgent", -5)):
        harness.add(name, 10, 6, priority=priority)
    harness.step()
    running = {sequence.request_id for sequence in harness.scheduler.running}
    assert running == {"urgent", "a"}
    harness.run()
    assert list(harness.ended) == ["urgent", "a", "b", "late"]


def test_a_suspect_of_failed_steps_gets_its_run_on_a_fragmented_line() -> None:
    """Its trial needs one run, and takes whatever is in its way."""
    poison = 995
    harness = Harness(
        make_memory(num_blocks=32),
        max_num_seqs=8,
        budget=512,
        faults=Faults(poison_token_id=poison),
    )
    for index, max_tokens in enumerate((2, 60, 2, 60)):
        harness.add(f"r{index}", 64, max_tokens)
    for _ in range(3):
        harness.step()
    harness.add("bad", [5] * 60 + [poison], 20)
    harness.run()
    assert harness.ended["bad"].finish_reason is FinishReason.ERROR
    assert [harness.ended[f"r{index}"].error for index in range(4)] == [None] * 4
