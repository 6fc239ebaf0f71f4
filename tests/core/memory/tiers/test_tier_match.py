"""What pool and tiers have of a prefix together, against the definition of each kind of group."""

import random

import pytest
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.content_spans import ContentSpan
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import hash_block
from quire.core.memory.packed_tokens import pack_tokens
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import page_name
from quire.core.memory.tiers.contract import Tail
from quire.core.memory.tiers.tier_match import TierFinder, TierPrefix

SIZE = 2
NUM_TOKENS = 15
FULL = KVGroup((0,), KVKind.FULL, 64)
WINDOW = KVGroup((1,), KVKind.WINDOW, 64, window=5)
STATE = KVGroup((2,), KVKind.STATE, 64, num_state_blocks=2)
GROUPS = {
    "full": (FULL,),
    "full, full": (FULL, KVGroup((3,), KVKind.FULL, 64)),
    "window": (WINDOW,),
    "window, full": (WINDOW, FULL),
    "state": (STATE,),
    "full, state": (FULL, STATE),
    "window, state, full": (WINDOW, STATE, FULL),
}


class Prefix:
    """A prompt, its chains in a domain of its own and in the public one, and what is kept of it."""

    def __init__(self, kinds: str, rng: random.Random) -> None:
        self.growth = Growth(GROUPS[kinds], SIZE)
        self.cache = PrefixCache(len(GROUPS[kinds]), SIZE, b"secret", main=self.growth.main)
        self.tiers = SlowTiers()
        self.token_ids = [rng.randrange(100) for _ in range(NUM_TOKENS)]
        self.roots = [self.cache.root("own"), self.cache.public_root]
        self.chains: list[list[bytes]] = [[], []]
        for chain, root in zip(self.chains, self.roots, strict=True):
            self.chain_tokens = self.cache.extend_chain(chain, root, self.token_ids)
        self.tails: dict[int, bytes] = {}  # by number of tokens, names
        self._rng = rng
        self._num_blocks = 0
        share = rng.choice((0.6, 0.85, 0.97))
        for which, index in [(which, at) for which in (0, 1) for at in range(len(self.chains[0]))]:
            if which and rng.random() < 0.7:
                continue
            for group, name in self.contents_at(self.chains[which][index]):
                if rng.random() < share:
                    self._keep(group, name, which, index)
        for num_tokens in range(1, NUM_TOKENS, 2):
            if rng.random() < 0.5:
                self._keep_tail(num_tokens, share)

    def contents_at(self, digest: bytes) -> list[tuple[int, bytes]]:
        """All that the groups may have at the end of a block."""
        states = [
            (rule.group, page_name(digest, page))
            for rule in self.growth.states
            for page in range(rule.num_blocks)
        ]
        return [(rule.group, digest) for rule in self.growth.growing] + states

    def is_there(self, group: int, name: bytes) -> bool:
        return self.cache.find(group, name) is not None or self.tiers.find(group, name)

    def _keep(self, group: int, name: bytes, which: int, index: int) -> None:
        if self._rng.random() < 0.5:
            self.tiers.kept.add((group, name))
            return
        chain, root = self.chains[which], self.roots[which]
        parent = chain[index - 1] if index else root
        tokens = self.chain_tokens[index]
        self.cache.insert_run(group, [name], [self._num_blocks], [tokens], parent, index == 0)
        self._num_blocks += 1

    def _keep_tail(self, num_tokens: int, share: float) -> None:
        """One that a tier knows by its tokens, right or wrong, and has in the groups or not."""
        index = num_tokens // SIZE
        parent = self.chains[0][index - 1] if index else self.roots[0]
        token_ids = self.token_ids[index * SIZE : num_tokens]
        if self._rng.random() < 0.3:
            token_ids = [token + 1 for token in token_ids]
        name = hash_block(parent, pack_tokens(token_ids))
        if token_ids == self.token_ids[index * SIZE : num_tokens]:
            self.tails[num_tokens] = name
        self.tiers.kept_tails[parent] = [Tail(pack_tokens(token_ids), name)]
        for group, content in self.contents_at(name):
            if self._rng.random() < share:
                self.tiers.kept.add((group, content))

    def longest(self) -> int:
        """Partly filled blocks are looked for where the full ones end: those of the groups that
        keep all tokens, and those that all can go on from."""
        full = max([at for at in range(SIZE, NUM_TOKENS, SIZE) if self.serves(at)], default=0)
        groups = [rule.group for rule in self.growth.unbounded]
        known = 0
        while known < len(self.chains[0]) and all(
            any(self.is_there(group, chain[known]) for chain in self.chains) for group in groups
        ):
            known += 1
        ends = {full + 1, known * SIZE + 1}
        return max([full, *(at for at in ends if at < NUM_TOKENS and self.serves(at))])

    def serves(self, num_tokens: int) -> bool:
        """Whether so many tokens can be gone on from, by the definition of each kind."""
        full, offset = divmod(num_tokens, SIZE)
        if offset and num_tokens not in self.tails:
            return False
        for rule in self.growth.growing:
            first = max(0, num_tokens - 4) // SIZE if rule.is_bounded else 0
            for index in range(first, full):
                if not any(self.is_there(rule.group, chain[index]) for chain in self.chains):
                    return False
            if offset and not self.is_there(rule.group, self.tails[num_tokens]):
                return False
        names = [self.tails[num_tokens]] if offset else [chain[full - 1] for chain in self.chains]
        states = [[key for key in self.contents_at(name) if len(key[1]) > 16] for name in names]
        return any(all(self.is_there(*key) for key in keys) for keys in states)


@pytest.mark.parametrize("kinds", GROUPS)
def test_the_longest_prefix_is_found_and_all_that_it_takes_is_named(kinds: str) -> None:
    found_lengths = set()
    for seed in range(150):
        prefix = Prefix(kinds, random.Random(seed))
        finder = TierFinder(prefix.cache, prefix.tiers, prefix.growth)
        found = finder.longest(
            TierPrefix(prefix.token_ids, prefix.chain_tokens, prefix.chains, prefix.roots, 0)
        )
        longest = prefix.longest()
        assert found.num_tokens == longest, f"seed {seed}"
        found_lengths.add(longest)
        blocks = [prefix.cache.find(each.group, each.name) for each in found.missing]
        assert blocks == [None] * len(blocks), "it is there"
        assert all(prefix.tiers.find(each.group, each.name) for each in found.missing)
        for content in found.missing:
            prefix.cache.insert_run(
                content.group,
                [content.name],
                [1000 + found.missing.index(content)],
                [content.tokens],
                content.parent,
                content.is_first,
            )
        prefix.cache.check()
        prefix.tiers.clear()
        prefix.tails = {count: name for count, name in prefix.tails.items() if count == longest}
        assert not longest or prefix.serves(longest), "what was named is not enough"
        assert len(set(found.missing)) == len(found.missing)
    assert len(found_lengths) > 3


def test_blocks_in_the_pool_are_not_looked_up_in_the_tier() -> None:
    prefix = Prefix("full", random.Random(0))
    prefix.tiers.clear()
    prefix.tiers.kept = {(0, digest) for digest in prefix.chains[0][3:6]}
    cache = PrefixCache(1, SIZE, b"secret")
    finder = TierFinder(cache, prefix.tiers, prefix.growth)
    of = TierPrefix(prefix.token_ids, prefix.chain_tokens, prefix.chains, prefix.roots, 3)
    found = finder.longest(of)
    assert (found.num_tokens, found.there) == (12, ())
    assert [each.name for each in found.missing] == prefix.chains[0][3:6]
    assert finder.longest(of._replace(held=0)).num_tokens == 0


def test_a_prefix_splits_no_content_that_is_computed_in_one_step() -> None:
    """The match names the blocks that the prefix before the content needs, and no later block."""
    prefix = Prefix("window, full", random.Random(0))
    prefix.tiers.clear()
    chain = prefix.chains[0]
    prefix.tiers.kept = {(group, digest) for group in (0, 1) for digest in chain[:6]}
    finder = TierFinder(PrefixCache(2, SIZE, b"secret"), prefix.tiers, prefix.growth)
    span = ContentSpan(5, 9, "0" * 32)
    of = TierPrefix(prefix.token_ids, prefix.chain_tokens, prefix.chains, prefix.roots, 0, (span,))
    found = finder.longest(of)
    assert (found.num_tokens, found.missing[0].name) == (12, chain[4])
    found = finder.longest(of._replace(spans=(span._replace(in_one_step=True),)))
    assert found.num_tokens == 4
    assert [each.name for each in found.missing] == chain[:2] * 2


@pytest.mark.parametrize("kinds", GROUPS)
def test_contents_that_a_tier_loses_during_the_search_are_named_as_missing(kinds: str) -> None:
    """A tier that finds a damaged record forgets it in a thread of its own."""

    class Losing(SlowTiers):
        def find(self, group: int, name: bytes) -> bool:
            is_there = super().find(group, name)
            self.kept.discard((group, name))
            return is_there

    num_missing = 0
    for seed in range(50):
        prefix = Prefix(kinds, random.Random(seed))
        longest = prefix.longest()
        losing = Losing()
        losing.kept, losing.kept_tails = set(prefix.tiers.kept), prefix.tiers.kept_tails
        finder = TierFinder(prefix.cache, losing, prefix.growth)
        of = TierPrefix(prefix.token_ids, prefix.chain_tokens, prefix.chains, prefix.roots, 0)
        found = finder.longest(of)
        assert found.num_tokens == longest, f"seed {seed}"
        num_missing += len(found.missing)
    assert num_missing > 0
