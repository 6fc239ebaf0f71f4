"""Moves that do not end keep their own blocks, and keep nothing else from going on."""

import pytest
from tests.core.harness import Harness, launch, make_groups, make_sequence
from tests.core.memory.test_kv_cache_manager import STEP, admit, write
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.tiers.contract import SOON_S
from quire.core.scheduling import invariants
from quire.core.scheduling.capacity_check import Verdict
from quire.simulation.fakes.fake_runner import Faults, InjectedFailureError

PROMPT = list(range(13))


def make(num_blocks: int = 16) -> tuple[KVCacheManager, SlowTiers]:
    tiers = SlowTiers()
    config = KVCacheConfig(make_groups(1), num_blocks, 4, True, b"secret", tiers=tiers)
    return KVCacheManager(config), tiers


def keep(memory: KVCacheManager, tiers: SlowTiers, prompt: list[int]) -> None:
    """The tiers have this prompt, and the pool has nothing."""
    memory.free(write(memory, prompt))
    while memory.moves is not None and (memory.moves.stores.num_waiting or tiers.stores):
        memory.set_time(memory.now_s + 0.01)
        tiers.end(tiers.stores)
    memory.set_time(memory.now_s + 0.01)
    memory.prefixes.clear()


def test_a_store_that_hangs_is_not_free_soon() -> None:
    memory, tiers = make()
    memory.free(write(memory, PROMPT))
    memory.set_time(10.0)
    assert len(tiers.stores) == 4
    assert memory.pool.num_free == 12
    assert memory.num_free_soon == 16
    memory.set_time(10.1 + SOON_S)
    assert memory.num_free_soon == memory.pool.num_free == 12
    tiers.end(tiers.stores)
    memory.set_time(20.0)
    assert memory.pool.num_free == memory.num_free_soon == 16
    invariants.check_memory(memory, [])


def test_a_load_that_hangs_is_given_up_and_is_not_free_soon() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    memory.set_time(10.0)
    moves, sequence = memory.moves, make_sequence(memory, [*PROMPT, 99])
    assert moves is not None
    assert moves.loads.begin(sequence, memory.match(sequence), 10.0)
    assert len(tiers.loads) == 4
    memory.set_time(10.04)
    assert moves.loads.awaits(sequence), "it has some patience"
    memory.set_time(10.06)
    assert not moves.loads.awaits(sequence)
    assert sorted(tiers.cancelled) == sorted(tiers.loads)
    assert (memory.pool.num_free, memory.num_free_soon) == (12, 16)
    memory.set_time(10.2 + SOON_S)
    assert (memory.pool.num_free, memory.num_free_soon) == (12, 12)
    invariants.check_memory(memory, [])
    admit(memory, sequence)
    memory.end_step(STEP)
    tiers.end(tiers.loads)
    memory.set_time(20.0)
    memory.free(sequence)
    assert memory.pool.num_free == 16
    assert memory.match(make_sequence(memory, [*PROMPT, 99])).num_tokens >= 12, "it came at last"
    invariants.check_memory(memory, [])


def test_others_make_room_where_moves_hang() -> None:
    memory, tiers = make()
    harness = Harness(memory)
    harness.add("old", 16, 1)
    while harness.scheduler.has_unfinished:
        harness.step()
    harness.now_s = 1.0
    first, second = harness.add("first", 20, 12), harness.add("second", 20, 12)
    for _ in range(200):
        if not harness.scheduler.has_unfinished:
            break
        harness.now_s += 0.1
        plan = harness.scheduler.schedule(harness.now_s)
        harness.check()
        if plan is not None:
            launch(harness.runner, plan)
            harness.land()
    assert first.is_finished
    assert second.is_finished
    assert tiers.stores, "they hang yet"
    harness.check_answers()


def test_a_loaded_prefix_is_not_reported_as_missing() -> None:
    memory, tiers = make(14)
    harness = Harness(memory)
    keep(memory, tiers, PROMPT)
    harness.now_s = memory.now_s
    harness.add("running", 44, 8)
    harness.step()
    sequence = harness.add("waiting", [*PROMPT, 99], 1)
    capacity = harness.scheduler.admission.capacity
    harness.step()
    assert sequence in capacity._failed
    while not tiers.loads:
        plan = harness.scheduler.schedule(harness.now_s)
        if plan is not None:
            launch(harness.runner, plan)
            harness.land()
    assert sequence not in capacity._failed
    assert capacity.check(sequence, 99) is Verdict.LOADS


@pytest.mark.parametrize("is_held", [True, False])
def test_a_suspect_waits_for_blocks_that_moves_hold(is_held: bool) -> None:
    memory, _ = make()
    harness = Harness(memory, faults=Faults(execute_fails_at=frozenset({1})))
    moves = memory.moves
    assert moves is not None
    harness.add("first", 20, 4)
    harness.step()
    with pytest.raises(InjectedFailureError):
        plan = harness.scheduler.schedule(0.0)
        assert plan is not None
        launch(harness.runner, plan)
        harness.land()
    harness.recover()
    held = memory.pool.take(memory.pool.num_free)[0] if is_held else []
    for block in held:
        moves.stores.in_flight[1000 + block] = block
        moves.stores._began_s[1000 + block] = 0.0
    plan = harness.scheduler.schedule(0.0)
    harness.check()
    assert (plan is None) == is_held
    for block in held:
        moves.stores.end(1000 + block, is_done=False)
    if plan is not None:
        launch(harness.runner, plan)
        harness.land()
