"""Equal hashes mean equal prefixes of one domain, and nothing else does."""

import random
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.memory.hash_chain import DIGEST_BYTES, hash_block
from quire.core.memory.packed_tokens import pack_tokens, unpack
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN, Eviction, PrefixCache


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
    hashes, changed_hashes = chain_of(cache, tokens), chain_of(cache, changed)
    first = 5 // block_size
    assert hashes[:first] == changed_hashes[:first]
    assert all(a != b for a, b in zip(hashes[first:], changed_hashes[first:], strict=True))


def test_equal_blocks_after_different_parents_differ() -> None:
    chain = chain_of(make(2), [5, 6, 5, 6, 5, 6])
    assert len(set(chain)) == 3


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=24), st.integers(0, 24))
def test_a_chain_grown_in_parts_equals_one_made_at_once(token_ids: list[int], cut: int) -> None:
    cache = make(3)
    chain: list[bytes] = []
    cache.extend_chain(chain, cache.root("a"), token_ids[:cut])
    cache.extend_chain(chain, cache.root("a"), token_ids)
    assert chain == chain_of(cache, token_ids, "a")


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_hashes_agree_exactly_as_far_as_the_full_blocks_do(
    left: list[int], right: list[int]
) -> None:
    cache = make(2)
    for index, (a, b) in enumerate(
        zip(chain_of(cache, left), chain_of(cache, right), strict=False)
    ):
        assert (a == b) == (left[: 2 * index + 2] == right[: 2 * index + 2])


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


def test_token_ids_use_all_their_31_bits() -> None:
    cache = make(1)
    ids = [0, 1, 255, 256, 65536, 2**30, 2**31 - 1]
    assert len({chain_of(cache, [token_id])[0] for token_id in ids}) == len(ids)


def test_a_partly_filled_block_has_a_hash_of_its_own() -> None:
    cache = make()
    (full,) = chain_of(cache, [1, 2, 3, 4])
    hashes = {hash_block(cache.root(""), pack_tokens([1, 2, 3, 4][:end])) for end in range(1, 4)}
    assert len(hashes | {full}) == 4
    assert hash_block(full, pack_tokens([1])) != hash_block(cache.root(""), pack_tokens([1]))


# ---- contents -----------------------------------------------------------------------------------

ROOT = make().root("")


def insert(
    cache: PrefixCache,
    group: int,
    digest: bytes,
    block: int,
    parent: bytes,
    token_ids: Sequence[int],
    is_first: bool = False,
) -> None:
    """One block that is not known yet."""
    run = cache.insert_run(group, [digest], [block], [pack_tokens(token_ids)], parent, is_first)
    assert run == [(block, digest)]


def fill(cache: PrefixCache, *blocks: list[int], group: int = 0) -> None:
    """First blocks of the domain "", as blocks 0, 1, ...; their digests are their tokens."""
    for block, token_ids in enumerate(blocks):
        insert(cache, group, bytes(token_ids), block, ROOT, token_ids, True)


def test_groups_are_maps_of_their_own() -> None:
    cache = make(num_groups=2)
    fill(cache, [1, 2, 3, 4])
    digest = bytes([1, 2, 3, 4])
    assert (cache.find(0, digest), cache.find(1, digest), len(cache)) == (0, None, 1)
    assert cache.find_all(digest, (0, 1)) is None, "one group lacks it"
    insert(cache, 1, digest, 18, ROOT, [1, 2, 3, 4], True)
    assert cache.find_all(digest, (0, 1)) == (0, 18)
    cache.remove_run([(0, digest)])
    assert (cache.find(0, digest), cache.find(1, digest), len(cache)) == (None, 18, 1)
    assert cache.closest_block(ROOT, pack_tokens([1, 2, 3, 4])) is None, (
        "the tree has what group 0 has"
    )
    cache.check()


def test_entries_are_a_copy() -> None:
    cache = make()
    fill(cache, [1])
    cache.entries(0).clear()
    assert cache.entries(0) == {bytes([1]): 0}


def test_has_public_is_true_while_a_first_public_block_exists() -> None:
    cache = make()
    fill(cache, [1, 2, 3, 4])
    assert not cache.has_public(cache.public_root)
    insert(cache, 0, b"public", 7, cache.public_root, [1, 2, 3, 4], True)
    assert cache.has_public(cache.public_root) and cache.public_root == cache.root(PUBLIC_DOMAIN)
    cache.remove_run([(0, b"public")])
    assert not cache.has_public(cache.public_root)


@pytest.mark.parametrize(
    ("wanted", "num_common", "found"),
    [
        ([5, 6, 7, 8], 4, (5, 6, 7, 8)),
        ([5, 6, 7, 9], 3, (5, 6, 7, 8)),
        ([5, 6, 7, 1], 3, (5, 6, 7, 8)),
        ([5, 6, 300, 1], 2, (5, 6, 256, 8)),
        ([5, 6], 2, (5, 6, 7, 8)),
        ([5, 1, 1, 1], 1, (5, 6, 7, 8)),
        ([1, 1, 1, 1], 0, (5, 6, 7, 8)),  # what else was seen there
        ([70000, 1], 2, (70000, 1)),  # a partly filled one
        ([70000, 1, 5], 2, (70000, 1)),
        ([65536, 2, 1, 1], 0, None),  # 65536 and 70000 share a byte, but no token
    ],
)
def test_the_neighbour_is_the_block_that_agrees_longest(
    wanted: list[int], num_common: int, found: tuple[int, ...] | None
) -> None:
    cache = make()
    tokens = [[5, 6, 7, 8], [5, 6, 256, 8], [70000, 1]]
    for block, token_ids in enumerate(tokens):
        insert(cache, 0, b"%d" % block, block, ROOT, token_ids, True)
    near = cache.closest_block(ROOT, pack_tokens(wanted))
    assert near is not None and near.num_common_tokens == num_common
    assert found is None or unpack(near.tokens) == list(found)
    assert near.digest == b"%d" % tokens.index(unpack(near.tokens))
    assert cache.closest_block(b"another parent", pack_tokens(wanted)) is None


BLOCKS = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(BLOCKS, min_size=1, max_size=12), BLOCKS)
def test_the_neighbour_agrees_as_long_as_any(blocks: list[list[int]], wanted: list[int]) -> None:
    cache = make()
    for block, token_ids in enumerate(sorted(set(map(tuple, blocks)))):
        insert(cache, 0, repr(token_ids).encode(), block, ROOT, token_ids)
    cache.check()
    near = cache.closest_block(ROOT, pack_tokens(wanted))
    assert near is not None
    agreeing = [num_common(token_ids, wanted) for token_ids in blocks]
    assert near.num_common_tokens == max(agreeing) == num_common(unpack(near.tokens), wanted)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


# ---- what is remembered of what is gone ---------------------------------------------------------


def test_the_last_evictions_are_remembered() -> None:
    cache = PrefixCache(1, 4, b"secret", num_remembered=8)
    digests = [bytes([number]) for number in range(40)]
    for number, digest in enumerate(digests):
        fill(cache, [number])
        cache.remove_run([(0, digest)], Eviction(float(number), "by"))
        evictions = [cache.eviction_of(digest) for digest in digests[: number + 1]]
        remembered = [eviction for eviction in evictions if eviction is not None]
        assert evictions[-len(remembered) :] == remembered, "the last ones, without a gap"
        assert min(number + 1, 4) <= len(remembered) <= 8
        assert remembered[-1] == Eviction(float(number), "by")
    fill(cache, [50])
    cache.remove_run([(0, bytes([50]))])
    assert cache.eviction_of(bytes([50])) is None, "forgotten for another reason than eviction"


def test_whether_others_have_a_first_block_is_counted_by_domain() -> None:
    cache = make()
    for block, name in enumerate(("a", "b")):
        insert(cache, 0, name.encode(), block, cache.root(name), [1, 2, 3, 4], True)
    insert(cache, 0, b"later", 2, b"a", [9, 9, 9, 9])
    assert cache.is_first_of_others(pack_tokens([1, 2, 3, 4]))
    assert not cache.is_first_of_others(pack_tokens([9, 9, 9, 9])), "it is no first block"
    cache.remove_run([(0, b"a")])
    assert cache.is_first_of_others(pack_tokens([1, 2, 3, 4]))
    cache.remove_run([(0, b"b")])
    assert not cache.is_first_of_others(pack_tokens([1, 2, 3, 4]))
    cache.check()


def test_the_longest_block_that_agrees_whole_is_that_of_the_definition() -> None:
    rng = random.Random(0)
    num_found = 0
    for _ in range(300):
        cache = PrefixCache(1, 4, b"secret")
        root = cache.root("")
        contents = {tuple(rng.choices((1, 2), k=rng.randrange(1, 5))) for _ in range(6)}
        for block, tokens in enumerate(contents):
            name = hash_block(root, pack_tokens(tokens))
            cache.insert_run(0, [name], [block], [pack_tokens(tokens)], root)
        wanted = rng.choices((1, 2), k=rng.randrange(1, 5))
        found = cache.closest_block(root, pack_tokens(wanted), is_whole=True)
        whole = [each for each in contents if list(each) == wanted[: len(each)]]
        longest = max(whole, key=len, default=None)
        assert (found and tuple(unpack(found.tokens))) == longest
        num_found += found is not None
        if found is not None:
            assert found.num_common_tokens == len(unpack(found.tokens))
            assert found.digest == hash_block(root, found.tokens)
    assert 100 < num_found < 300
