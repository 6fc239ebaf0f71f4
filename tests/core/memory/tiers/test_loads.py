"""Loads: what is held and for how long, whatever ends when, and however."""

import random

import pytest
from tests.core.harness import make_sequence
from tests.core.memory.test_kv_cache_manager import STEP, admit, compute, write
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.memory.tiers.loads import Loads
from quire.core.scheduling import invariants
from quire.core.sequence import Sequence

FULL = KVGroup((0,), KVKind.FULL, 64)
KINDS = {
    "full": (FULL,),
    "full, full": (FULL, KVGroup((1,), KVKind.FULL, 64)),
    "full, window": (FULL, KVGroup((1,), KVKind.WINDOW, 64, window=9)),
    "full, state": (FULL, KVGroup((1,), KVKind.STATE, 64, num_state_blocks=2)),
}
PROMPT = list(range(14))


def make(kinds: str = "full", num_blocks: int = 40) -> tuple[KVCacheManager, SlowTiers]:
    tiers = SlowTiers()
    config = KVCacheConfig(KINDS[kinds], num_blocks, 4, True, b"secret", tiers=tiers)
    return KVCacheManager(config), tiers


def loads_of(memory: KVCacheManager) -> Loads:
    assert memory.moves is not None
    return memory.moves.loads


def run(memory: KVCacheManager, token_ids: list[int]) -> None:
    """A request, from its beginning to its end."""
    sequence = make_sequence(memory, token_ids)
    admit(memory, sequence)
    go_through(memory, sequence)
    memory.free(sequence)


def go_through(memory: KVCacheManager, sequence: Sequence) -> None:
    """All its tokens are computed, where there is room for them."""
    if memory.grow(sequence, len(sequence.token_ids)) is not None:
        compute(memory, sequence)
    memory.end_step(STEP)


def keep(memory: KVCacheManager, tiers: SlowTiers, token_ids: list[int]) -> None:
    """The tiers have what a request has left, and the pool nothing."""
    run(memory, token_ids)
    for _ in range(20):
        memory.set_time(memory.now_s + 0.5)
        tiers.end(tiers.stores)
    memory.set_time(memory.now_s + 0.01)
    memory.prefixes.clear()
    assert memory.moves is not None
    assert not memory.moves.num_in_flight


def begin(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> Sequence:
    sequence = make_sequence(memory, token_ids, domain=domain)
    loads_of(memory).begin(sequence, memory.match(sequence), memory.now_s)
    return sequence


def pass_time(memory: KVCacheManager, seconds: float = 0.001) -> None:
    memory.set_time(memory.now_s + seconds)
    invariants.check_memory(memory, [])


@pytest.mark.parametrize("kinds", KINDS)
def test_loaded_blocks_are_found_and_all_are_released(kinds: str) -> None:
    memory, tiers = make(kinds)
    keep(memory, tiers, PROMPT)
    sequence = begin(memory, [*PROMPT, 99])
    assert loads_of(memory).awaits(sequence)
    tiers.end(tiers.loads)
    pass_time(memory)
    assert not loads_of(memory).awaits(sequence)
    assert memory.match(sequence).num_tokens == len(PROMPT)
    assert memory.pool.num_held == loads_of(memory).num_held([sequence]) > 0
    memory.free(sequence)
    pass_time(memory)
    assert memory.pool.num_held == 0
    assert memory.match(make_sequence(memory, [*PROMPT, 99])).num_tokens == len(PROMPT)


def test_two_with_one_prefix_share_a_load() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    first, second = begin(memory, [*PROMPT, 99]), begin(memory, [*PROMPT, 98])
    assert len(tiers.loads) == 4
    memory.free(first)
    assert not tiers.cancelled, "another waits for it"
    assert loads_of(memory).awaits(second)
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(second).num_tokens == len(PROMPT)
    memory.free(second)
    assert memory.pool.num_held == 0


def test_an_abort_cancels_and_its_blocks_are_held_until_the_end() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    memory.free(begin(memory, [*PROMPT, 99]))
    assert sorted(tiers.cancelled) == sorted(tiers.loads)
    pass_time(memory)
    assert memory.pool.num_held == len(tiers.loads) == 4
    tiers.end(tiers.loads, is_done=False)
    pass_time(memory)
    assert memory.pool.num_held == 0
    assert memory.match(make_sequence(memory, PROMPT)).num_tokens == 0


@pytest.mark.parametrize("is_late", [True, False])
def test_a_cancelled_load_is_ordered_again_for_the_next_request(is_late: bool) -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    memory.free(begin(memory, [*PROMPT, 99]))
    cancelled = list(tiers.loads)
    again = begin(memory, [*PROMPT, 99])
    assert len(tiers.loads) == 2 * len(cancelled)
    if not is_late:
        tiers.end(cancelled, is_done=False)
        pass_time(memory)
        assert loads_of(memory).awaits(again)
    tiers.end(set(tiers.loads) - set(cancelled))
    pass_time(memory)
    assert memory.match(again).num_tokens == len(PROMPT)
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(again).num_tokens == len(PROMPT)
    assert not loads_of(memory)._by_content
    memory.free(again)
    assert memory.pool.num_held == 0


def test_a_load_that_fails_in_part_serves_up_to_there() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    sequence = begin(memory, [*PROMPT, 99])
    orders = sorted(tiers.loads)
    tiers.end([orders[1]], is_done=False)
    tiers.end([orders[0], *orders[2:]])
    pass_time(memory)
    assert not loads_of(memory).awaits(sequence)
    assert memory.match(sequence).num_tokens == 4
    assert loads_of(memory).stats.num_failed_blocks == 1
    memory.free(sequence)
    assert memory.pool.num_held == 0


def test_a_tenant_loads_nothing_of_another() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    begin(memory, [*PROMPT, 99], domain="another")
    assert not tiers.loads


def test_blocks_cleared_during_a_load_are_not_published() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    sequence = begin(memory, [*PROMPT, 99])
    assert memory.moves is not None
    memory.prefixes.clear()
    memory.moves.clear()
    assert not loads_of(memory).awaits(sequence)
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(sequence).num_tokens == memory.pool.num_held == 0


def test_nothing_is_loaded_where_computing_is_faster() -> None:
    memory, tiers = make()
    keep(memory, tiers, PROMPT)
    loads_of(memory).compute_time.observe(100, 5050, 0.001)
    tiers.seconds = 1.0
    sequence = begin(memory, [*PROMPT, 99])
    assert not tiers.loads
    assert loads_of(memory).num_known_tokens(sequence) == len(PROMPT)
    tiers.seconds = 1e-6
    again = loads_of(memory).begin(sequence, memory.match(sequence), memory.now_s)
    assert not again, "it is decided once"
    begin(memory, [*PROMPT, 99])
    assert tiers.loads


@pytest.mark.parametrize("kinds", KINDS)
def test_nothing_leaks_whatever_happens(kinds: str) -> None:
    """Random ends, aborts, admissions, late moves and clears; every reference is accounted for."""
    num_loaded = 0
    for seed in range(6):
        rng = random.Random(seed)
        memory, tiers = make(kinds)
        prompts = [[*PROMPT[: 4 * rng.randrange(4)], *[50 + at] * rng.randrange(1, 12)]
                   for at in range(4)]  # fmt: skip
        for prompt in prompts:
            keep(memory, tiers, prompt)
        waiting: list[Sequence] = []
        running: list[Sequence] = []
        for _ in range(250):
            happens = rng.randrange(9)
            if happens < 2:
                waiting.append(begin(memory, [*rng.choice(prompts), 90 + rng.randrange(3)]))
            elif happens == 2 and (tiers.loads or tiers.stores):
                orders = [*tiers.loads, *tiers.stores]
                ended = rng.sample(orders, rng.randrange(1, len(orders) + 1))
                tiers.end(ended, is_done=rng.random() < 0.8)
            elif happens == 3 and waiting:
                memory.free(waiting.pop(rng.randrange(len(waiting))))
            elif happens == 4 and waiting:
                loads_of(memory).abandon(rng.choice(waiting))
            elif happens in (5, 6) and waiting:
                sequence = rng.choice(waiting)
                match = memory.match(sequence)
                if memory.num_blocks_to_admit(sequence, match) <= memory.pool.num_free:
                    waiting.remove(sequence)
                    running.append(sequence)
                    memory.admit(sequence, match, STEP)
                    go_through(memory, sequence)
            elif happens == 7 and running:
                memory.free(running.pop(rng.randrange(len(running))))
            elif happens == 8 and rng.random() < 0.1 and memory.moves is not None:
                memory.prefixes.clear()
                memory.moves.clear()
            memory.set_time(memory.now_s + rng.choice((0.0, 0.001, 0.1, 2.0)))
            invariants.check_memory(memory, running)
            if len(running) > 2:
                memory.free(running.pop(0))
        for sequence in (*waiting, *running):
            memory.free(sequence)
        num_loaded += loads_of(memory).stats.num_loaded_blocks
        while tiers.loads or tiers.stores:
            tiers.end([*tiers.loads, *tiers.stores], is_done=False)
            memory.set_time(memory.now_s + 0.01)
        memory.set_time(memory.now_s + 0.01)
        tiers.end([*tiers.loads, *tiers.stores])
        tiers.takes_stores = False
        memory.set_time(memory.now_s + 0.01)
        assert memory.pool.num_held == 0
        assert not loads_of(memory)._num_known
        assert not loads_of(memory)._by_content
    assert num_loaded > 20


def test_the_tail_of_an_abandoned_load_is_evicted_first() -> None:
    memory, tiers = make()
    prompt = list(range(40))
    keep(memory, tiers, prompt)
    sequence = begin(memory, [*prompt, 99])
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(sequence).num_tokens == 40
    loads_of(memory).abandon(sequence)
    write(memory, list(range(100, 100 + 4 * (memory.pool.num_free - 7))))
    assert memory.match(sequence).num_tokens == 28


def test_the_tail_of_a_prefix_in_the_pool_is_evicted_first() -> None:
    memory, tiers = make()
    prompt = list(range(40))
    keep(memory, tiers, prompt)
    run(memory, prompt[:36])
    sequence = begin(memory, [*prompt, 99])
    assert len(tiers.loads) == 1
    tiers.end(tiers.loads, is_done=False)
    pass_time(memory)
    loads_of(memory).abandon(sequence)
    write(memory, list(range(100, 100 + 4 * (memory.pool.num_free - 7))))
    assert memory.match(sequence).num_tokens == 28


def test_public_blocks_that_were_loaded_behind_own_ones_are_found() -> None:
    memory, tiers = make()
    public = make_sequence(memory, PROMPT[:12], domain=PUBLIC_DOMAIN)
    admit(memory, public)
    go_through(memory, public)
    memory.free(public)
    pass_time(memory)
    tiers.end(tiers.stores)
    pass_time(memory)
    memory.prefixes.clear()
    tiers.takes_stores = False
    own = make_sequence(memory, PROMPT[:4], domain="tenant")
    admit(memory, own)
    go_through(memory, own)
    memory.free(own)
    sequence = begin(memory, [*PROMPT[:12], 99], domain="tenant")
    assert len(tiers.loads) == 2
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(sequence).num_tokens == 12
    memory.free(sequence)
    assert memory.match(make_sequence(memory, [*PROMPT[:12], 99], domain="other")).num_tokens == 0


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize(("beside", "follows"), [(50, 99), (99, 50)])
def test_a_state_within_a_block_is_found_beside_blocks_that_go_on_from_it(
    beside: int, follows: int, is_loaded: bool
) -> None:
    memory, tiers = make("full, state", num_blocks=60)
    if is_loaded:
        keep(memory, tiers, PROMPT)
    else:
        tiers.takes_stores = False
        run(memory, PROMPT)
    run(memory, [*PROMPT, *[beside] * 4])
    sequence = begin(memory, [*PROMPT, *[follows] * 4])
    assert bool(tiers.loads) == is_loaded
    tiers.end(tiers.loads)
    pass_time(memory)
    assert memory.match(sequence).num_tokens == len(PROMPT)
