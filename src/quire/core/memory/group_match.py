"""Finds how much of a prefix each KV group can serve, by its growth rule.

A group that keeps all tokens serves a prefix up to the first block that is not cached. A window
group serves a prefix if the blocks that the next token attends to are cached. A state group serves
only a prefix with a cached snapshot of the state at its end. Each group in turn shortens the prefix
to the longest that it can serve, until no group shortens it further. The result is the longest
prefix that all groups can serve. Only `prefix_index` uses this module.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from quire.core.memory.growth import Growth, GrowthRule
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.step import HOLE_BLOCK

Chains = Sequence[Sequence[bytes]]
"""Alternative hash chains, such as a sequence's own and the public chain; entry i is the hash of
block i."""

StatePages = tuple[tuple[int, ...], ...]
"""The blocks of a snapshot, by state group."""


class GroupPart(NamedTuple):
    """The end of a prefix that all groups can serve."""

    #: Number of tokens in the prefix.
    num_tokens: int
    #: The partly filled block at the end of the prefix, by group with slots; empty if the prefix
    #: ends with a full block.
    partial: tuple[int, ...]
    #: The snapshot of the states after the prefix; empty without states.
    states: StatePages


NOTHING = GroupPart(0, (), ())


class GroupMatch:
    """Looks up blocks and snapshots in the prefix cache."""

    def __init__(self, cache: PrefixCache, growth: Growth, snapshots: StateSnapshots) -> None:
        self._cache = cache
        self._growth = growth
        self._snapshots = snapshots
        self._full = [rule.group for rule in growth.unbounded]

    def full_runs(self, chains: Chains, index: int, longest: int) -> tuple[list[list[int]], int]:
        """Cached blocks from `index` on of the groups that keep all tokens, and the index of their
        end.

        The end is at most `longest`; it is `longest` if no group keeps all tokens.
        """
        blocks: list[list[int]] = [[] for _ in self._full]
        if not blocks:
            return blocks, longest
        chains = list(chains)
        num_stops = 0
        while index < longest and num_stops < len(chains):  # where one chain ends, try another
            run = self._cache.find_run(chains[0], index, longest, self._full)
            for ids, more in zip(blocks, run, strict=True):
                ids += more
            num_stops = 1 if run[0] else num_stops + 1
            index += len(run[0])
            chains.reverse()
        return blocks, index

    def longest(self, chains: Chains, most: int) -> int:
        """Number of blocks, at most `most`, of the longest prefix that every bounded group can
        serve."""
        bounded, before = self._growth.bounded, -1
        while most != before:
            before = most
            for rule in bounded:
                most = rule.longest(most, partial(self._has, rule, chains))
        return most

    def part(
        self, chains: Chains, index: int, num_common: int, digest: bytes, partial: tuple[int, ...]
    ) -> GroupPart:
        """The part of block `index` that every group can serve; NOTHING if a group can't serve any.

        The first num_common tokens of block `index` agree with the content `digest`, which the
        blocks `partial` hold.
        """
        num_tokens = index * self._growth.block_size + num_common
        if not num_common:
            return NOTHING
        for rule in self._growth.windows:
            needed = rule.first_needed(num_tokens)
            if not all([self._has(rule, chains, at + 1) for at in range(needed, index)]):
                return NOTHING
        states: StatePages = ()
        if self._growth.states:
            found = self._snapshots.find(digest)
            if found is None or self._cache.num_tokens(digest) != num_common:
                return NOTHING
            states = found
        return GroupPart(num_tokens, partial, states)

    def blocks(
        self, chains: Chains, runs: Sequence[Sequence[int]], end: int, num_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        """The first `end` blocks, by group; empty for groups of states.

        `runs` has the blocks of groups that keep all tokens. In window groups, blocks that are not
        read after num_tokens tokens are holes.
        """
        blocks: list[tuple[int, ...]] = [()] * len(self._growth.rules)
        for group, run in zip(self._full, runs, strict=True):
            blocks[group] = tuple(run[:end])
        for rule in self._growth.windows:
            needed = min(rule.first_needed(num_tokens), end)
            found = [self._find(rule, chains, index) for index in range(needed, end)]
            there = tuple(block for block in found if block is not None)
            blocks[rule.group] = (HOLE_BLOCK,) * needed + there
        return tuple(blocks)

    def states(self, chains: Chains, num_blocks: int) -> StatePages | None:
        """The snapshot after num_blocks full blocks; None if there is none."""
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
