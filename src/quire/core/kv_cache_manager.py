"""Block tables by KV group: match, grow, publish, free. The sole user of pool and prefix cache.

A sequence's tables grow in all groups together, since every group stores every token. Blocks that
a step in flight may still read are not freed with their sequence: their reference passes to that
step and ends with it.
"""

from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.block_pool import BlockPool
from quire.core.kv_groups import KVGroup
from quire.core.prefix_cache import PrefixCache
from quire.core.sequence import Sequence
from quire.core.step import EditKind, TableEdit


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the memory is made of.

    num_blocks: pages in the pool, shared by all groups. block_size: tokens in a block of one group.
    secret: keys the content hashes (16 random bytes of the installation, or of this process).
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    secret: bytes = b""


class PrefixMatch(NamedTuple):
    """Cached blocks that a sequence can start from, by group; all of equal length."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    num_revived: int  # how many of them are free now and would be taken from the free ones


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    Invariant: a block's reference count is the number of table entries that name it plus the number
    of entries in steps in flight that hold it; `invariants.check_memory` says so after any step.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.num_groups, config.block_size, config.secret)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_blocks = 0
        # References that outlive their table: (the step that may still read, blocks).
        self._held_by_steps: deque[tuple[int, list[int]]] = deque()
        self.num_blocks_held_by_steps = 0

    @property
    def num_free_soon(self) -> int:
        """Blocks that are free, or will be when the steps in flight have ended."""
        return self.pool.num_free + self.num_blocks_held_by_steps

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens of one sequence occupy, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def start_chain(self, domain: str) -> bytes:
        """The root of a new sequence's hash chain."""
        return self.cache.root(domain)

    def hash_prompt(self, branches: list[Sequence]) -> None:
        """Hash the prompt that new branches have in common, once for all of them."""
        if self.config.enable_prefix_caching:
            self._extend_chain(branches[0])
            for sequence in branches[1:]:
                sequence.chain = list(branches[0].chain)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest cached prefix, at full blocks, that leaves at least one token to compute.

        Changes nothing but the sequence's chain of hashes.
        """
        nothing = PrefixMatch(0, ((),) * self.num_groups, 0)
        if not self.config.enable_prefix_caching or sequence.needs_prompt_logprobs:
            return nothing
        self._extend_chain(sequence)
        longest = (sequence.num_tokens - 1) // self.block_size
        blocks: list[list[int]] = [[] for _ in range(self.num_groups)]
        for digest in sequence.chain[:longest]:
            found = [self.cache.find(group, digest) for group in range(self.num_groups)]
            if None in found:
                break
            for group, block in enumerate(found):
                assert block is not None
                blocks[group].append(block)
        ref_count = self.pool.ref_count
        num_revived = sum(ref_count[block] == 0 for ids in blocks for block in ids)
        return PrefixMatch(
            len(blocks[0]) * self.block_size, tuple(tuple(ids) for ids in blocks), num_revived
        )

    def can_admit(self, sequence: Sequence, match: PrefixMatch, num_spare_blocks: int) -> bool:
        """Whether all tokens known so far fit, beside so many blocks left for others."""
        needed = self.num_blocks_to_admit(sequence, match)
        return needed + num_spare_blocks <= self.pool.num_free

    def num_blocks_to_admit(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Free blocks that `admit` takes: new ones, and matched ones that nobody holds."""
        num_matched = sum(len(ids) for ids in match.blocks)
        return self.blocks_for(sequence.num_tokens) - num_matched + match.num_revived

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence its tables: the matched blocks, shared, and new ones for the rest."""
        for ids in match.blocks:
            for block in ids:
                self.pool.share(block)
        sequence.block_tables = tuple(list(ids) for ids in match.blocks)
        sequence.num_slots = match.num_tokens
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_published_blocks = match.num_tokens // self.block_size
        if self.config.enable_prefix_caching and sequence.num_admissions == 0:
            self.num_query_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += match.num_tokens
            sequence.num_cached_tokens = match.num_tokens
        sequence.num_admissions += 1
        edits = self.grow(sequence, sequence.num_tokens)
        assert edits is not None, "admit without can_admit"

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int, Ids[int]]] | None:
        """Make room for num_tokens tokens; all groups or none.

        Returns (group, first new logical block, new block ids) of each group, or None where the
        pool has too few free blocks; then nothing was changed.
        """
        first = sequence.num_slots // self.block_size
        missing = -(-num_tokens // self.block_size) - first
        if missing <= 0:
            return []
        if missing * self.num_groups > self.pool.num_free:
            return None
        edits: list[tuple[int, int, Ids[int]]] = []
        for group, table in enumerate(sequence.block_tables):
            taken, evicted = self.pool.take(missing)
            for key in evicted:
                self.cache.remove(*key)
            self.num_evicted_blocks += len(evicted)
            table.extend(taken)
            edits.append((group, first, taken))
        sequence.num_slots += missing * self.block_size
        return edits

    def publish(self, sequence: Sequence, num_written_tokens: int) -> None:
        """Make the full blocks among the first num_written_tokens findable by their content.

        A content that is known already keeps its older block; this one stays private.
        """
        full = num_written_tokens // self.block_size
        if not self.config.enable_prefix_caching:
            sequence.num_published_blocks = full
            return
        self._extend_chain(sequence)
        for index in range(sequence.num_published_blocks, full):
            digest = sequence.chain[index]
            for group, table in enumerate(sequence.block_tables):
                if self.cache.find(group, digest) is None:
                    self.cache.insert(group, digest, table[index])
                    self.pool.set_content(table[index], (group, digest))
        sequence.num_published_blocks = full

    def free(self, sequence: Sequence, after_step_id: int | None = None) -> None:
        """Take a sequence's blocks back, at once or when step after_step_id has ended.

        The chain's tail goes first, so that it is evicted before the prefix that others share.
        """
        tails_first = zip(*(reversed(table) for table in sequence.block_tables), strict=True)
        blocks = [block for blocks_of_groups in tails_first for block in blocks_of_groups]
        sequence.block_tables = ()
        sequence.num_slots = 0
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        if after_step_id is None:
            for block in blocks:
                self.pool.release(block)
        elif blocks:
            self._held_by_steps.append((after_step_id, blocks))
            self.num_blocks_held_by_steps += len(blocks)

    def end_step(self, step_id: int) -> None:
        """Release what steps up to step_id held."""
        waiting = deque[tuple[int, list[int]]]()
        for held_by, blocks in self._held_by_steps:
            if held_by > step_id:
                waiting.append((held_by, blocks))
                continue
            self.num_blocks_held_by_steps -= len(blocks)
            for block in blocks:
                self.pool.release(block)
        self._held_by_steps = waiting

    def blocks_held_by_steps(self) -> list[int]:
        """One entry for each reference that a step in flight holds; for checks."""
        return [block for _, blocks in self._held_by_steps for block in blocks]

    def clear_cache(self) -> None:
        """Forget all cached contents; held blocks stay with their holders, unpublished."""
        for group in range(self.num_groups):
            for digest, block in self.cache.entries(group).items():
                self.cache.remove(group, digest)
                self.pool.forget(block)

    def _extend_chain(self, sequence: Sequence) -> None:
        if len(sequence.chain) < len(sequence.token_ids) // self.block_size:
            self.cache.extend_chain(sequence.chain, sequence.chain_root, sequence.token_ids)


def append_edits(row: int, grown: list[tuple[int, int, Ids[int]]]) -> list[TableEdit]:
    """The plan's words for what `grow` did to the table of `row`."""
    return [
        TableEdit(row, group, EditKind.APPEND, first, tuple(ids)) for group, first, ids in grown
    ]
