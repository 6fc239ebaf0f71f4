"""Finds cached blocks by the hashes of their contents.

`hash_chain` computes the hashes. Handles hashes and block ids, not sequences; only
`kv_cache_manager` and the modules that it is made of use it.

Blocks with the same parent are sorted by their tokens. So the block that agrees longest with a
prompt is next to the position at which the prompt's tokens would be inserted, and two comparisons
find it among any number of blocks.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.memory.hash_chain import HashChains
from quire.core.memory.packed_tokens import TOKEN_BYTES, Spans, num_packed
from quire.core.sequence import Eviction

FIRST_LOOKUPS = 16

# The domain whose prefixes all requests may read. No request's own domain has this name, because
# the server puts a fixed prefix before the domains that it derives from key names and salts.
PUBLIC_DOMAIN = "*"


class Neighbour(NamedTuple):
    """The cached child of a parent block that agrees longest with given tokens."""

    digest: bytes
    num_common_tokens: int
    #: Its positions, packed by `packed_tokens`.
    tokens: bytes


_Child = tuple[bytes, bytes]
"""(tokens, digest) of a block that follows a parent. Tokens are packed by `packed_tokens`, so that
the bytes sort like the tokens."""

Node = tuple[bytes, bytes, bool]
"""(parent, tokens, whether the parent is the root of a domain) of a block."""


class PrefixCache:
    """Content hash -> block, by KV group.

    Invariant, for which the manager updates cache and pool together: `find(group, digest) == block`
    if and only if `pool.content[block] == (group, digest)`. A digest is in the tree of tokens if
    and only if the main group has it.
    """

    def __init__(
        self,
        num_groups: int,
        block_size: int,
        secret: bytes,
        num_remembered: int = 0,
        main: int | None = 0,
    ) -> None:
        """num_remembered: number of evicted contents whose time and request are remembered. main:
        the group whose contents are in the tree of tokens; None for no group."""
        self.block_size = block_size
        self._chains = HashChains(secret, block_size)
        self._main = main
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        # The tree of tokens. Plain tuples, and a bare digest for an only child, keep the number of
        # objects small. Keyed by block, not by digest, so that adjacent blocks of a large pool have
        # adjacent keys.
        #: Maps each block to its node. Only `PrefixCache` changes the map.
        self.nodes: dict[int, Node] = {}
        self._children: dict[bytes, bytes | list[_Child]] = {}
        self._roots_of_first: dict[bytes, Counter[bytes]] = {}  # first block's tokens -> roots
        # Two generations of evicted contents; the older is dropped when the younger is full.
        # Deleting the first entry of a single dict again and again would get ever slower.
        self._evictions: dict[bytes, Eviction] = {}
        self._old_evictions: dict[bytes, Eviction] = {}
        self._evictions_per_generation = num_remembered // 2
        self.public_root = self.root(PUBLIC_DOMAIN)

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks)

    # ---- hashes -----------------------------------------------------------------------------

    def root(self, domain: str, extra: bytes = b"") -> bytes:
        """The hash from which a chain of `domain` starts.

        extra: anything else that determines the content of all blocks (an adapter's digest).
        """
        return self._chains.root(domain, extra)

    def extend_chain(
        self, chain: list[bytes], root: bytes, token_ids: Sequence[int], spans: Spans = ()
    ) -> list[bytes]:
        """Append the hashes of the full blocks of `token_ids` that `chain` lacks; see
        `HashChains.extend`."""
        return self._chains.extend(chain, root, token_ids, spans)

    # ---- contents ---------------------------------------------------------------------------

    def find(self, group: int, digest: bytes) -> int | None:
        """The block with this content, or None."""
        return self._blocks[group].get(digest)

    def find_all(self, digest: bytes, groups: Sequence[int]) -> tuple[int, ...] | None:
        """The blocks with this content in these groups, or None if a group lacks it."""
        found = tuple([self._blocks[group].get(digest, -1) for group in groups])
        return None if -1 in found else found

    def find_run(
        self, chain: Sequence[bytes], first: int, last: int, groups: Sequence[int]
    ) -> tuple[list[int], ...]:
        """For each of these groups, the blocks of chain[first:last] up to the first block that any
        group lacks."""
        runs: list[list[int]] = []
        for blocks in [self._blocks[group] for group in groups]:
            run: list[int] = []
            at, width = first, FIRST_LOOKUPS
            while at < last:
                found = list(map(blocks.get, chain[at : min(at + width, last)]))
                if None in found:
                    run += found[: found.index(None)]  # type: ignore[arg-type]
                    break
                run += found  # type: ignore[arg-type]
                at, width = at + width, 2 * width
            last = first + len(run)  # the other groups need not look further
            runs.append(run)
        return tuple(run[: last - first] for run in runs)

    def num_tokens(self, digest: bytes) -> int | None:
        """Number of tokens in the content; None if the main group does not have it."""
        block = None if self._main is None else self.find(self._main, digest)
        return None if block is None else num_packed(self.nodes[block][1])

    def tail(self, digest: bytes) -> tuple[bytes, bytes] | None:
        """The parent and the tokens of a partly filled block in the main group; None for other
        contents."""
        block = None if self._main is None else self.find(self._main, digest)
        node = None if block is None else self.nodes[block]
        if node is None or num_packed(node[1]) == self.block_size:
            return None
        return node[:2]

    def has_public(self, public_root: bytes) -> bool:
        """Whether anything is published for all domains, under this root."""
        return public_root in self._children

    def insert_run(
        self,
        group: int,
        digests: Sequence[bytes],
        blocks: Sequence[int],
        tokens: Sequence[bytes],
        parent: bytes,
        is_first: bool = False,
    ) -> list[tuple[int, bytes]]:
        """Make adjacent blocks of one prompt findable, except contents that are cached already.

        tokens: the tokens of each block, packed by `packed_tokens`. parent: the digest before the
        first block, or the root if it is the first of the chain (is_first). Returns (block, digest)
        of the new contents.
        """
        known = self._blocks[group]
        parents = [parent, *digests][: len(digests)]
        # First, leave out contents that are known already.
        if any(map(known.__contains__, digests)):
            new = [at for at, digest in enumerate(digests) if digest not in known]
            is_first = is_first and 0 in new
            digests, blocks = [digests[at] for at in new], [blocks[at] for at in new]
            tokens, parents = [tokens[at] for at in new], [parents[at] for at in new]
        # Then list the new contents.
        self.insert(group, digests, blocks, tokens, parents, is_first)
        return list(zip(blocks, digests, strict=True))

    def insert(
        self,
        group: int,
        digests: Sequence[bytes],
        blocks: Sequence[int],
        tokens: Sequence[bytes],
        parents: Sequence[bytes],
        is_first: bool = False,
    ) -> None:
        """Make blocks findable whose contents are not cached. Each has its own parent.

        is_first: whether blocks[0] is the first block of its chain. The other blocks never are.
        """
        nodes, children = self.nodes, self._children
        self._blocks[group].update(zip(digests, blocks, strict=True))
        if group != self._main:
            return
        for digest, block, own, before in zip(digests, blocks, tokens, parents, strict=True):
            nodes[block] = before, own, is_first
            siblings = children.setdefault(before, digest)
            if siblings is not digest:
                listed = self._listed(siblings)
                insort(listed, (own, digest))
                children[before] = listed
            if is_first:
                self._roots_of_first.setdefault(own, Counter())[before] += 1
                is_first = False

    def remove_run(
        self, keys: Sequence[tuple[int, bytes]], eviction: Eviction | None = None
    ) -> None:
        """Forget contents, each (group, digest).

        eviction: remembered for a while, for `eviction_of`; None if the contents were not evicted.
        """
        nodes, children, evictions = self.nodes, self._children, self._evictions
        remembers = eviction is not None and self._evictions_per_generation > 0
        blocks, main = self._blocks, self._main
        for group, digest in keys:
            block = blocks[group].pop(digest)
            if group != main:
                continue
            parent, tokens, is_first = nodes.pop(block)
            siblings = children.pop(parent)
            if siblings != digest:
                _remove_sibling(children, parent, siblings, (tokens, digest))
            if is_first:
                _forget_first(self._roots_of_first, parent, tokens)
        if remembers and eviction is not None:
            gone = [digest for group, digest in keys if group == main]
            evictions.update(dict.fromkeys(gone, eviction))
        if remembers and len(evictions) >= self._evictions_per_generation:
            self._old_evictions, self._evictions = evictions, {}

    def closest_block(
        self, parent: bytes, wanted: bytes, *, is_whole: bool = False
    ) -> Neighbour | None:
        """The block after `parent` that agrees longest with the packed positions `wanted`; None if
        no block follows.

        A result with 0 common tokens only shows that other tokens follow `parent`. is_whole: only
        consider blocks all of whose tokens agree.
        """
        siblings = self._children.get(parent)
        if siblings is None:
            return None
        listed = self._listed(siblings)
        place = bisect_left(listed, (wanted, b""))
        near = listed[max(0, place - 1) : place + 1]
        common, tokens, digest = max(
            (_num_common_bytes(wanted, tokens), tokens, digest) for tokens, digest in near
        )
        if is_whole and common < len(tokens):
            return _longest_whole(listed, wanted[: common // TOKEN_BYTES * TOKEN_BYTES])
        return Neighbour(digest, num_packed(wanted[:common]), tokens)

    def has_other_child(self, parent: bytes, digest: bytes) -> bool:
        """Whether a block other than that of `digest` follows `parent`."""
        return self._children.get(parent, digest) != digest

    # ---- reasons of misses ------------------------------------------------------------------

    def eviction_of(self, digest: bytes) -> Eviction | None:
        """The last eviction of a content that is not cached now; None if it is not remembered."""
        return self._evictions.get(digest) or self._old_evictions.get(digest)

    def is_first_of_others(self, tokens: bytes) -> bool:
        """Whether some domain has a cached prompt that begins with this full block, packed.

        Called after the request's own domain was searched. For operators: never sent to clients.
        """
        return bool(self._roots_of_first.get(tokens))

    # ---- checks -----------------------------------------------------------------------------

    def entries(self, group: int) -> dict[bytes, int]:
        """A copy of one group's map, for checks."""
        return dict(self._blocks[group])

    def check(self) -> None:
        """Raise AssertionError unless the tree has exactly the digests of the main group."""
        listed_in = {} if self._main is None else self._blocks[self._main]
        assert self.nodes.keys() == set(listed_in.values())
        num_listed = 0
        for parent, siblings in self._children.items():
            if isinstance(siblings, bytes):  # an only child, as most are
                num_listed += 1
                assert self.nodes[listed_in[siblings]][0] == parent, "the tree and the nodes differ"
                continue
            assert len(siblings) > 1 and siblings == sorted(siblings)
            num_listed += len(siblings)
            for tokens, digest in siblings:
                node = self.nodes[listed_in[digest]]
                assert node[:2] == (parent, tokens), "the tree and the nodes differ"
        assert num_listed == len(self.nodes)
        firsts = sum(sum(counts.values()) for counts in self._roots_of_first.values())
        assert firsts == sum([node[2] for node in self.nodes.values()])

    def _listed(self, siblings: bytes | list[_Child]) -> list[_Child]:
        """The children of one parent as a list, even for a single child."""
        if isinstance(siblings, list):
            return siblings
        assert self._main is not None
        return [(self.nodes[self._blocks[self._main][siblings]][1], siblings)]


def _remove_sibling(
    children: dict[bytes, bytes | list[_Child]],
    parent: bytes,
    siblings: bytes | list[_Child],
    child: _Child,
) -> None:
    assert isinstance(siblings, list), "the only child is not the one to remove"
    del siblings[bisect_left(siblings, child)]
    children[parent] = siblings if len(siblings) > 1 else siblings[0][1]


def _longest_whole(listed: Sequence[_Child], wanted: bytes) -> Neighbour | None:
    """The longest child whose tokens are all at the beginning of `wanted`."""
    for length in range(len(wanted), 0, -TOKEN_BYTES):
        tokens = wanted[:length]
        place = bisect_left(listed, (tokens, b""))
        if place < len(listed) and listed[place][0] == tokens:
            return Neighbour(listed[place][1], num_packed(tokens), tokens)
    return None


def _forget_first(roots_of_first: dict[bytes, Counter[bytes]], root: bytes, tokens: bytes) -> None:
    counts = roots_of_first[tokens]
    counts[root] -= 1
    if not counts[root]:
        del counts[root]
    if not counts:
        del roots_of_first[tokens]


def _num_common_bytes(first: bytes, second: bytes) -> int:
    """Number of leading bytes that agree."""
    length = min(len(first), len(second))
    difference = int.from_bytes(first[:length], "big") ^ int.from_bytes(second[:length], "big")
    return length - (difference.bit_length() + 7) // 8
