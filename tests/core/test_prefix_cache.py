"""Equal hashes mean equal prefixes of one domain, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.prefix_cache import DIGEST_BYTES, PrefixCache


def make(block_size: int = 4, secret: bytes = b"secret", num_groups: int = 1) -> PrefixCache:
    return PrefixCache(num_groups, block_size, secret)


def chain_of(cache: PrefixCache, token_ids: list[int], domain: str = "") -> list[bytes]:
    chain: list[bytes] = []
    cache.extend_chain(chain, cache.root(domain), token_ids)
    return chain


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2)]
)
def test_only_full_blocks_have_a_hash(num_tokens: int, num_blocks: int) -> None:
    chain = chain_of(make(), list(range(num_tokens)))
    assert [len(digest) for digest in chain] == [DIGEST_BYTES] * num_blocks


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_changed_token_changes_all_hashes_from_its_block_on(block_size: int) -> None:
    cache = make(block_size)
    tokens = list(range(12))
    changed = [*tokens[:5], 99, *tokens[6:]]
    one, other = chain_of(cache, tokens), chain_of(cache, changed)
    first = 5 // block_size
    assert one[:first] == other[:first]
    assert all(a != b for a, b in zip(one[first:], other[first:], strict=True))


def test_equal_blocks_after_different_parents_differ() -> None:
    chain = chain_of(make(2), [5, 6, 5, 6, 5, 6])
    assert len(set(chain)) == 3


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=24), st.integers(0, 24))
def test_a_chain_grown_in_parts_equals_one_made_at_once(token_ids: list[int], cut: int) -> None:
    cache = make(3)
    chain: list[bytes] = []
    cache.extend_chain(chain, cache.root("a"), token_ids[:cut])
    cache.extend_chain(chain, cache.root("a"), token_ids)
    assert chain == chain_of(cache, token_ids, "a")


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_hashes_agree_exactly_as_far_as_the_full_blocks_do(one: list[int], two: list[int]) -> None:
    cache = make(2)
    for index, (a, b) in enumerate(zip(chain_of(cache, one), chain_of(cache, two), strict=False)):
        assert (a == b) == (one[: 2 * index + 2] == two[: 2 * index + 2])


def test_domains_extras_and_secrets_separate_roots() -> None:
    cache = make()
    roots = [
        cache.root(""),
        cache.root("a"),
        cache.root("b"),
        cache.root("ab"),
        cache.root("a", b"b"),
        cache.root("", b"ab"),
        cache.root("é"),
        make(secret=b"other").root("a"),
        make(secret=b"").root("a"),
    ]
    assert len(set(roots)) == len(roots)
    assert cache.root("a") == make().root("a")


def test_token_ids_use_all_their_32_bits() -> None:
    cache = make(1)
    ids = [0, 1, 255, 256, 65536, 2**31, 2**32 - 1]
    assert len({chain_of(cache, [token_id])[0] for token_id in ids}) == len(ids)


def test_groups_are_maps_of_their_own() -> None:
    cache = make(num_groups=2)
    digest = chain_of(cache, [1, 2, 3, 4])[0]
    cache.insert(0, digest, 17)
    assert (cache.find(0, digest), cache.find(1, digest), len(cache)) == (17, None, 1)
    cache.insert(1, digest, 18)
    cache.remove(0, digest)
    assert (cache.find(0, digest), cache.find(1, digest), len(cache)) == (None, 18, 1)


def test_entries_are_a_copy() -> None:
    cache = make()
    cache.insert(0, b"x", 1)
    cache.entries(0).clear()
    assert cache.entries(0) == {b"x": 1}
