"""Finds the longest prefix that pool and tiers can serve together, and the contents to load.

A prefix needs the same contents as in the pool (see `group_match`). Groups that keep all tokens
serve a prefix up to the first missing block, a window by its last run of blocks, and a state by the
snapshot at the prefix's end.
"""

from collections.abc import Sequence as Ids
from functools import partial
from typing import NamedTuple

from quire.core.content_spans import last_cut
from quire.core.memory.group_match import Chains
from quire.core.memory.growth import Growth, GrowthRule
from quire.core.memory.packed_tokens import Spans, num_packed, pack
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import page_name
from quire.core.memory.tiers.contract import Tiers


class WantedContent(NamedTuple):
    """A content that a prefix needs, with the arguments of `PrefixCache.insert_run`.

    parent, tokens and is_first have no meaning for blocks of states.
    """

    group: int
    name: bytes
    parent: bytes = b""
    tokens: bytes = b""
    is_first: bool = False


class TierMatch(NamedTuple):
    """A prefix that pool and tiers can serve together."""

    #: Number of tokens in the prefix.
    num_tokens: int
    #: Blocks of the pool that it needs.
    there: tuple[int, ...] = ()
    #: Contents that it needs from the tiers.
    missing: tuple[WantedContent, ...] = ()


class TierPrefix(NamedTuple):
    """A sequence's tokens and hashes. The tiers are searched for the longest prefix of them."""

    #: All tokens of the sequence.
    token_ids: Ids[int]
    #: Tokens of each of its full blocks, packed by `packed_tokens`.
    chain_tokens: Ids[bytes]
    #: Alternative hash chains, with their roots in `roots`; see `group_match.Chains`.
    chains: Chains
    roots: Ids[bytes]
    #: Number of leading full blocks that the sequence holds, which are not looked for.
    held: int
    #: All contents of the sequence.
    spans: Spans = ()


class TierFinder:
    """Looks up contents in the pool and in the tiers."""

    def __init__(self, cache: PrefixCache, tiers: Tiers, growth: Growth) -> None:
        self._cache = cache
        self._tiers = tiers
        self._growth = growth
        # Whether each content that the current search has looked up is there. A tier may lose a
        # damaged content at any time; its load then fails, but the search stays consistent.
        self._looked_up: dict[tuple[int, bytes], bool] = {}

    def longest(self, prefix: TierPrefix) -> TierMatch:
        """The longest prefix that leaves a token to compute, and splits no content that is computed
        in one step."""
        self._looked_up.clear()
        most = len(prefix.token_ids) - 1
        while True:
            found = self._longest(prefix, most)
            most = last_cut(prefix.spans, found.num_tokens)
            if most == found.num_tokens:
                return found

    def _longest(self, prefix: TierPrefix, most: int) -> TierMatch:
        """The longest prefix of at most `most` tokens."""
        known = self._full_end(prefix, most)
        end = known
        before = -1
        while end != before:
            before = end
            for rule in self._growth.bounded:
                end = rule.longest(end, partial(self._has, rule, prefix))
        best = TierMatch(end * self._growth.block_size)
        if end > prefix.held:
            best = self._collect(prefix, end, end * self._growth.block_size, None)
        for index in dict.fromkeys((known, end)):
            tailed = self._with_tail(prefix, index, most)
            if tailed is not None and tailed.num_tokens > best.num_tokens:
                best = tailed
        return best

    def _full_end(self, prefix: TierPrefix, most: int) -> int:
        """Number of leading full blocks, of at most `most` tokens, in the groups that keep all
        tokens."""
        end, longest = prefix.held, most // self._growth.block_size
        groups = [rule.group for rule in self._growth.unbounded]
        if not groups:
            return longest
        while end < longest and all([self._digest(group, prefix, end) for group in groups]):
            end += 1
        return end

    def _with_tail(self, prefix: TierPrefix, index: int, most: int) -> TierMatch | None:
        """The longest prefix of at most `most` tokens that ends in a stored, partly filled block
        after block `index`."""
        size, best = self._growth.block_size, None
        rest = pack(prefix.token_ids, index * size, (index + 1) * size, prefix.spans)
        num_left = most - index * size
        for chain, root in zip(prefix.chains, prefix.roots, strict=True):
            if index > len(chain):
                continue
            parent = chain[index - 1] if index else root
            for tail in self._tiers.tails(parent):
                length = num_packed(tail.tokens)
                num_tokens = index * size + length
                # Skip tails that agree only in part: a state is that after all tokens of the tail.
                if length > num_left or not rest.startswith(tail.tokens):
                    continue
                if best is not None and num_tokens <= best.num_tokens:
                    continue
                if not self._serves(prefix, index, num_tokens, tail.name):
                    continue
                wanted = WantedContent(0, tail.name, parent, tail.tokens, not index)
                best = self._collect(prefix, index, num_tokens, wanted)
        return best

    def _serves(self, prefix: TierPrefix, index: int, num_tokens: int, name: bytes) -> bool:
        """Whether every group can continue after a partly filled block."""
        for rule in self._growth.growing:
            needed = range(rule.first_needed(num_tokens), index) if rule.is_bounded else ()
            if not self._is_there(rule.group, name):
                return False
            if not all([self._has(rule, prefix, at + 1) for at in needed]):
                return False
        return not self._growth.states or self._has_state(name)

    def _collect(
        self, prefix: TierPrefix, end: int, num_tokens: int, tail: WantedContent | None
    ) -> TierMatch:
        """The contents needed by a prefix of `end` full blocks and, if there is one, a tail after
        them."""
        wanted: list[WantedContent] = []
        # First, list the contents of groups with slots, then the states.
        for rule in self._growth.growing:
            first = max(prefix.held, rule.first_needed(num_tokens) if rule.is_bounded else 0)
            for index in range(first, end):
                found = self._digest(rule.group, prefix, index)
                assert found is not None, "a content was found, but is not there"
                which, name = found
                chain = prefix.chains[which]
                parent = chain[index - 1] if index else prefix.roots[which]
                tokens = prefix.chain_tokens[index]
                wanted.append(WantedContent(rule.group, name, parent, tokens, index == 0))
            if tail is not None:
                wanted.append(tail._replace(group=rule.group))
        if self._growth.states:
            state = tail.name if tail is not None else self._state(prefix, end)
            assert state is not None, "a state was found, but is not there"
            for rule in self._growth.states:
                wanted += [
                    WantedContent(rule.group, page_name(state, page))
                    for page in range(rule.num_blocks)
                ]
        # Then divide them into blocks of the pool and contents of the tiers.
        there, missing = [], []
        for content in wanted:
            block = self._cache.find(content.group, content.name)
            if block is None:
                missing.append(content)
            else:
                there.append(block)
        return TierMatch(num_tokens, tuple(there), tuple(missing))

    def _has(self, rule: GrowthRule, prefix: TierPrefix, count: int) -> bool:
        if not rule.has_slots:
            return self._state(prefix, count) is not None
        return self._digest(rule.group, prefix, count - 1) is not None

    def _digest(self, group: int, prefix: TierPrefix, index: int) -> tuple[int, bytes] | None:
        """(index of the first chain whose block `index` is in the pool or a tier, that block's
        name); None if there is none."""
        for which, chain in enumerate(prefix.chains):
            if index < len(chain) and self._is_there(group, chain[index]):
                return which, chain[index]
        return None

    def _state(self, prefix: TierPrefix, count: int) -> bytes | None:
        """The digest of an available state after `count` full blocks; None without one."""
        for chain in prefix.chains:
            if 0 < count <= len(chain) and self._has_state(chain[count - 1]):
                return chain[count - 1]
        return None

    def _has_state(self, digest: bytes) -> bool:
        return all(
            [
                self._is_there(rule.group, page_name(digest, page))
                for rule in self._growth.states
                for page in range(rule.num_blocks)
            ]
        )

    def _is_there(self, group: int, name: bytes) -> bool:
        is_there = self._looked_up.get((group, name))
        if is_there is None:
            is_there = self._cache.find(group, name) is not None or self._tiers.find(group, name)
            self._looked_up[group, name] = is_there
        return is_there
