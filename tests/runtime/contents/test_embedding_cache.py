"""The cache of embeddings evicts by the cost of encoding again, as a definition says."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.runtime.contents.embedding_cache import EmbeddingCache

MAX_BYTES = 24


def embeddings(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def names(cache: EmbeddingCache) -> set[str]:
    return set(cache._entries)


class Definition:
    """Each entry remembers the time of its last use, and the floor at that time."""

    def __init__(self) -> None:
        #: Size, cost, time of the last use, and floor at that time, by name.
        self.entries: dict[str, tuple[int, float, int, float]] = {}
        self.floor, self.now = 0.0, 0

    def use(self, name: str, size: int, encode_s: float) -> None:
        self.now += 1
        if name in self.entries:
            size, cost, *_ = self.entries[name]
            self.entries[name] = size, cost, self.now, self.floor
            return
        if size > MAX_BYTES:
            return
        while sum(each[0] for each in self.entries.values()) + size > MAX_BYTES:
            gone = min(self.entries, key=self.rank)
            self.floor, _ = self.rank(gone)
            del self.entries[gone]
        self.entries[name] = size, encode_s / size, self.now, self.floor

    def rank(self, name: str) -> tuple[float, int]:
        _, cost, used, floor = self.entries[name]
        return floor + cost, used


SIZES = {"a": 4, "b": 4, "c": 8, "d": 8, "e": 12, "f": 24, "g": 28}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, 4)), max_size=40))
def test_evictions_follow_the_definition(uses: list[tuple[str, int]]) -> None:
    cache, expected = EmbeddingCache(MAX_BYTES), Definition()
    for name, encode_s in uses:
        found = cache.find(name)
        assert (found is not None) == (name in expected.entries)
        if found is None:
            cache.keep(name, embeddings(SIZES[name]), float(encode_s))
        expected.use(name, SIZES[name], float(encode_s))
        assert names(cache) == set(expected.entries)
        assert cache.num_bytes == sum(SIZES[each] for each in expected.entries) <= MAX_BYTES


def test_equal_costs_are_evicted_by_their_last_use() -> None:
    cache = EmbeddingCache(16)
    for name in "abcd":
        cache.keep(name, embeddings(4), 1.0)
    assert cache.find("a") is not None
    cache.keep("e", embeddings(8), 2.0)
    assert names(cache) == {"d", "a", "e"}


def test_a_costly_entry_outlives_cheap_ones_but_not_for_good() -> None:
    cache = EmbeddingCache(8)
    cache.keep("costly", embeddings(4), 3.5)
    survived = 0
    for number in range(10):
        cache.keep(f"cheap {number}", embeddings(4), 1.0)
        survived += "costly" in names(cache)
    assert survived == 4


def test_an_entry_above_the_bound_evicts_nothing() -> None:
    cache = EmbeddingCache(8)
    cache.keep("small", embeddings(8), 1.0)
    cache.keep("large", embeddings(9), 1.0)
    assert names(cache) == {"small"}
