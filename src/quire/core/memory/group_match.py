"""How much of a prefix groups can serve that do not keep all tokens.

A window serves a prefix if it has the run of blocks that the next token sees; a state, if a
snapshot was left just there. The longest prefix that all can serve is found by asking in turn until
none shortens it: each answers with the longest that it can serve, so nothing longer is passed over.
Used by `prefix_index` alone, once it knows what the groups have that keep all tokens.
"""

from collections.abc import Sequence
from functools import partial

from quire.core.memory.growth import Growth, GrowthRule
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.step import HOLE_BLOCK

Chains = Sequence[Sequence[bytes]]
"""Alternatives, such as a sequence's own chain and that of what is published for all; entry i of
each names the content of block i."""

StatePages = tuple[tuple[int, ...], ...]
"""By state group, the pages of a snapshot."""


class GroupMatch:
    """Looks up windows' blocks and states' snapshots in the prefix cache."""

    def __init__(self, cache: PrefixCache, growth: Growth, snapshots: StateSnapshots) -> None:
        self._cache = cache
        self._growth = growth
        self._snapshots = snapshots

    def longest(self, chains: Chains, most: int) -> int:
        """Blocks of the longest prefix, of at most `most`, that every bounded group can serve."""
        bounded, before = self._growth.bounded, -1
        while most != before:
            before = most
            for rule in bounded:
                most = rule.longest(most, partial(self._has, rule, chains))
        return most

    def serves_part(self, chains: Chains, index: int, num_tokens: int) -> bool:
        """Whether windows can go on after num_tokens tokens, which end within block `index`."""
        for rule in self._growth.windows:
            needed = rule.first_needed(num_tokens)
            if not all([self._has(rule, chains, at + 1) for at in range(needed, index)]):
                return False
        return True

    def run(self, rule: GrowthRule, chains: Chains, end: int, num_tokens: int) -> tuple[int, ...]:
        """A window's first `end` blocks, with holes before what is read after num_tokens tokens."""
        needed = min(rule.first_needed(num_tokens), end)
        found = [self._find(rule, chains, index) for index in range(needed, end)]
        return (HOLE_BLOCK,) * needed + tuple(block for block in found if block is not None)

    def states(self, chains: Chains, num_blocks: int) -> StatePages | None:
        """The snapshot after so many full blocks."""
        for chain in chains:
            if 0 < num_blocks <= len(chain):
                found = self._snapshots.find(chain[num_blocks - 1])
                if found is not None:
                    return found
        return None

    def _has(self, rule: GrowthRule, chains: Chains, count: int) -> bool:
        if not rule.has_slots:
            return self.states(chains, count) is not None
        return self._find(rule, chains, count - 1) is not None

    def _find(self, rule: GrowthRule, chains: Chains, index: int) -> int | None:
        for chain in chains:
            if index < len(chain):
                block = self._cache.find(rule.group, chain[index])
                if block is not None:
                    return block
        return None
