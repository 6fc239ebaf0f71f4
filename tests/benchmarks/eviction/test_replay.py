"""Replays small enough to count by hand."""

from benchmarks.eviction.algorithms import Lru
from benchmarks.eviction.replay import Cache, HitRate, PoolCache, replay
from benchmarks.eviction.traces import Access

from quire.core.memory.eviction import EVICTION_ORDERS


def requests(*chains: str, hold_s: float = 0.0) -> list[Access]:
    """One a second; letters are blocks."""
    return [
        Access(float(number), hold_s, tuple(map(ord, chain))) for number, chain in enumerate(chains)
    ]


def caches(num_blocks: int) -> list[Cache]:
    """LRU twice: the study's own, and the engine's pool."""
    return [Lru(num_blocks, []), PoolCache(num_blocks, EVICTION_ORDERS.get("lru"))]


def hits(accesses: list[Access], num_blocks: int) -> int:
    (count,) = {replay(accesses, cache, num_blocks).num_hits for cache in caches(num_blocks)}
    return count


def test_equal_prefixes_hit() -> None:
    assert hits(requests("abc", "abd", "abde", "xb"), 9) == 5 + 0  # ab, abd; x has no b behind it


def test_the_rate_is_over_all_blocks_asked_for() -> None:
    rate = replay(requests("abc", "abd"), Lru(9, []), 9)
    assert rate == HitRate(num_blocks=6, num_hits=2, num_skipped=0)
    assert rate.percent == 100 * 2 / 6
    assert HitRate(0, 0, 0).percent == 0.0


def test_tails_are_evicted_before_heads() -> None:
    assert hits(requests("abcd", "xy", "abcd"), 5) == 3  # x and y took the place of d alone


def test_blocks_of_a_running_request_are_not_evicted() -> None:
    chains = ("abcd", "uvw", "uvw", "abcd")
    assert hits(requests(*chains), 5) == 3 + 2
    # Held for 2.5 s, the first keeps all; the second has to wait for it, and goes second as ever.
    assert hits(requests(*chains, hold_s=2.5), 7) == hits(requests(*chains), 7) == 3 + 4


def test_a_request_waits_for_the_first_to_end() -> None:
    long = Access(0.0, 100.0, (1, 2))
    short = Access(1.0, 5.0, (3, 4))
    next_one = Access(2.0, 1.0, (5, 6))
    again = [Access(200.0, 0.0, (1, 2)), Access(201.0, 0.0, (3, 4))]
    assert hits([long, short, next_one, again[0]], 4) == 2
    assert hits([long, short, next_one, again[1]], 4) == 0


def test_requests_longer_than_the_pool_are_left_out_and_counted() -> None:
    for cache in caches(2):
        assert replay(requests("abc", "ab", "ab"), cache, 2) == HitRate(4, 2, 1)


def test_two_that_run_at_once_share_a_block() -> None:
    accesses = requests("abc", "abd", "abe", hold_s=10.0)
    for cache in caches(5):
        assert replay(accesses, cache, 5).num_hits == 4
        assert cache.num_free == 5  # in the end
        cache.hold(ord("a"))
        cache.hold(ord("a"))
        assert cache.num_free == 4
        cache.release(ord("a"), 0)
        assert cache.num_free == 4


def test_a_block_behind_a_gap_is_no_hit_and_is_not_stored_twice() -> None:
    for cache in caches(4):
        replay(requests("abcd", "ab"), cache, 4)
        replay(requests("x"), cache, 4)  # takes d
        assert ord("c") in cache and ord("d") not in cache
        assert replay([Access(0.0, 0.0, (ord("q"), ord("c")))], cache, 4).num_hits == 0
        assert ord("c") in cache
