"""A cache for many domains: each finds its own alone, and pushes out none that has less."""

from quire.text.grammars.domain_cache import DomainCache


def test_a_domain_finds_what_it_kept_alone() -> None:
    cache: DomainCache[int] = DomainCache(10, 100)
    cache.store("alice", "key", 1, 5)
    cache.store("bob", "key", 2, 5)
    cache.store("bob", "key", 3, 5)
    assert (cache.find("alice", "key"), cache.find("bob", "key")) == (1, 2)
    assert cache.find("eve", "key") is None and cache.find("bob", "other") is None
    assert len(cache) == 2


def test_the_largest_domain_loses_what_it_used_least_recently() -> None:
    cache: DomainCache[int] = DomainCache(100, 100)
    cache.store("alice", "small", 0, 10)
    for at in range(1_000):
        cache.store("bob", at, at, 10)
        if at >= 3:
            assert cache.find("bob", 1) == 1
    assert cache.find("alice", "small") == 0
    assert [at for at in range(1_000) if cache.find("bob", at) is not None] == [
        1,
        *range(992, 1000),
    ]


def test_the_least_recently_used_of_equal_domains_is_evicted() -> None:
    cache: DomainCache[int] = DomainCache(3, 1_000)
    for name in ("a", "b", "c"):
        cache.store(name, "key", 1, 10)
    assert cache.find("a", "key") == 1
    cache.store("d", "key", 1, 10)
    assert [name for name in "abcd" if cache.find(name, "key")] == ["a", "c", "d"]


def test_entries_larger_than_the_cache_are_not_kept() -> None:
    cache: DomainCache[int] = DomainCache(3, 100)
    cache.store("a", "key", 1, 101)
    assert cache.find("a", "key") is None and len(cache) == 0
    assert DomainCache[int](0, 100).find("a", "key") is None


def test_removed_entries_make_room() -> None:
    cache: DomainCache[int] = DomainCache(2, 100)
    for key in ("a", "b"):
        cache.store("alice", key, 1, 50)
    cache.forget("alice", "a")
    cache.forget("alice", "a")
    cache.forget("bob", "a")
    assert cache.find("alice", "a") is None and len(cache) == 1
    cache.store("bob", "a", 2, 50)
    assert (cache.find("alice", "b"), cache.find("bob", "a")) == (1, 2)
    cache.forget("bob", "a")
    assert list(cache._domains) == list(cache._domain_bytes) == ["alice"]
