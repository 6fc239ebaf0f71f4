"""What is stored, and when."""

from tests.core.harness import make_sequence
from tests.core.memory.test_kv_cache_manager import STEP, admit, compute, fork, write
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.packed_tokens import pack_tokens
from quire.core.memory.tiers.write_behind import (
    BETWEEN_ORDERS_S,
    LENT_S,
    MAX_SHARE,
    STORE_DELAY_S,
    WriteBehind,
)
from quire.core.scheduling import invariants

FULL = KVGroup((0,), KVKind.FULL, 64)
STATE = KVGroup((1,), KVKind.STATE, 64, num_state_blocks=1)
PROMPT = list(range(14))


def make(*groups: KVGroup, num_blocks: int = 64) -> tuple[KVCacheManager, SlowTiers]:
    tiers = SlowTiers()
    config = KVCacheConfig(groups or (FULL,), num_blocks, 4, True, b"secret", tiers=tiers)
    return KVCacheManager(config), tiers


def stores_of(memory: KVCacheManager) -> WriteBehind:
    assert memory.moves is not None
    return memory.moves.stores


def test_full_blocks_are_stored_at_once_and_tails_once_unheld() -> None:
    memory, tiers = make()
    sequence = write(memory, PROMPT)
    memory.set_time(0.1)
    assert [each.name for each in tiers.stores.values()] == sequence.chain
    memory.free(sequence)
    memory.set_time(0.2)
    *full, tail = tiers.stores.values()
    assert all(not each.tokens and not each.parent for each in full)
    assert (tail.parent, tail.tokens) == (sequence.chain[-1], pack_tokens(PROMPT[12:]))
    tiers.end(tiers.stores)
    memory.set_time(0.3)
    assert stores_of(memory).num_stored == 4
    assert memory.pool.num_held == 0


def test_a_tail_that_a_fork_writes_behind_waits() -> None:
    memory, tiers = make(num_blocks=16)
    parent = write(memory, PROMPT)
    child = fork(memory, parent)
    memory.free(parent)
    for at in range(5):
        memory.set_time(at * STORE_DELAY_S)
    assert not any(each.tokens for each in tiers.stores.values())
    memory.free(child)
    tiers.end(tiers.stores)
    memory.set_time(10 * STORE_DELAY_S)
    assert any(each.tokens for each in tiers.stores.values())


def test_a_tail_waits_also_where_the_main_group_has_lost_it() -> None:
    """Its block of the other group is held by a fork, which may yet write to it."""
    memory, tiers = make(FULL, KVGroup((1,), KVKind.FULL, 64))
    parent = write(memory, PROMPT)
    child = fork(memory, parent)
    memory.free(parent)
    tail = memory.pool.content[child.block_tables[0][3]]
    assert tail is not None
    memory.cache.remove_run([tail])
    memory.pool.forget(child.block_tables[0][3])
    for at in range(5):
        memory.set_time(at * STORE_DELAY_S)
    assert tail[1] not in [each.name for each in tiers.stores.values()]
    invariants.check_memory(memory, [child])


def test_states_are_stored_a_while_later_unless_they_are_demoted() -> None:
    memory, tiers = make(FULL, STATE)
    sequence = make_sequence(memory, PROMPT[:12])
    admit(memory, sequence)
    compute(memory, sequence)
    memory.end_step(STEP)
    memory.free(sequence)
    memory.set_time(0.1)
    assert {each.group for each in tiers.stores.values()} == {0}
    states = [block for block, key in enumerate(memory.pool.content) if key and key[0] == 1]
    assert states
    memory.set_time(0.2 + STORE_DELAY_S)
    assert {each.block for each in tiers.stores.values() if each.group == 1} == set(states)
    memory, tiers = make(FULL, STATE)
    memory.free(write(memory, PROMPT[:12]))
    memory.set_time(0.1)
    for block in states:
        memory.pool.demote(block)
    memory.set_time(0.2 + STORE_DELAY_S)
    assert {each.group for each in tiers.stores.values()} == {0}


def test_blocks_under_way_are_bounded_and_the_rest_is_evicted_first() -> None:
    memory, tiers = make(num_blocks=160)
    memory.free(write(memory, list(range(400))))
    memory.set_time(0.1)
    most = int(160 * MAX_SHARE)
    assert len(tiers.stores) == most
    assert memory.pool.num_held == most
    memory.free(write(memory, list(range(1000, 1560))))
    tiers.end(tiers.stores)
    for at in range(1, 40):
        memory.set_time(at)
        tiers.end(tiers.stores)
    stores = stores_of(memory)
    assert not stores.num_waiting
    assert stores.num_too_late > 0
    there = {key for key in memory.pool.content if key is not None}
    assert there <= tiers.kept
    assert stores.num_stored == len(tiers.kept)
    assert memory.pool.num_held == 0


def test_the_tail_of_blocks_stored_together_is_evicted_first() -> None:
    memory, tiers = make(num_blocks=160)
    memory.free(write(memory, list(range(40))))
    memory.set_time(0.1)
    assert len(tiers.stores) == 10
    tiers.end(tiers.stores)
    memory.set_time(0.2)
    write(memory, list(range(100, 100 + 4 * (memory.pool.num_free - 7))))
    assert memory.match(make_sequence(memory, list(range(41)))).num_tokens == 28


def test_free_blocks_that_are_needed_are_taken_from_stores_that_have_not_begun() -> None:
    memory, tiers = make(num_blocks=256)
    memory.set_time(1.0)
    held = write(memory, PROMPT)
    memory.set_time(1.0)
    free = write(memory, [50, *PROMPT])
    memory.free(free)
    memory.set_time(2.0)
    ordered = list(tiers.stores)
    memory.set_time(1.99 + LENT_S)
    stores_of(memory).cancel_last(2)
    assert not tiers.cancelled, "their stores may be over in a moment"
    memory.set_time(2.01 + LENT_S)
    stores_of(memory).cancel_last(2)
    assert tiers.cancelled == ordered[:-3:-1]
    stores_of(memory).cancel_last(100)
    own = [order for order in ordered if tiers.stores[order].block not in held.block_tables[0]]
    assert tiers.cancelled == own[::-1], "what a sequence holds is not free when its store ends"
    tiers.end(tiers.cancelled[:2], is_done=False)
    num_free = memory.pool.num_free
    memory.set_time(2.02 + LENT_S)
    assert memory.pool.num_free == num_free + 2
    assert stores_of(memory).num_not_stored == 2


def test_a_few_blocks_are_ordered_together() -> None:
    memory, tiers = make(num_blocks=256)
    sequence = write(memory, PROMPT)
    memory.set_time(1.0)
    assert len(tiers.stores) == 3
    memory.free(sequence)
    memory.set_time(1.0 + BETWEEN_ORDERS_S / 2)
    assert len(tiers.stores) == 3, "the rest of it can wait for more"
    write(memory, [*range(100, 130)])
    memory.set_time(1.0 + 0.6 * BETWEEN_ORDERS_S)
    assert len(tiers.stores) == 3 + 8, "it is no more a few"
    write(memory, [*range(200, 206)])
    memory.set_time(1.0 + 0.7 * BETWEEN_ORDERS_S)
    assert len(tiers.stores) == 11
    memory.set_time(1.0 + 1.7 * BETWEEN_ORDERS_S)
    assert len(tiers.stores) == 12
