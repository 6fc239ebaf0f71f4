"""What each block of the pool is doing: who owns it, how often it was used, how full it is.

Reads a manager and the sequences that live, changes nothing. Costs O(held blocks) and O(blocks
told): for people who ask, never for a step. Called by `engine.engine`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.memory_report import Holdings
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK

Owner = tuple[str, int]
"""(request id, branch index) of a sequence."""


class BlockState(Enum):
    """What a block is to the pool."""

    HELD = "held"  # by tables, or by steps in flight alone: then it has no owners
    CACHED = "cached"  # free, with content that a prompt may find
    FREE = "free"


@dataclass(frozen=True, slots=True)
class BlockUse:
    """One block.

    group: whose tokens it holds, of the KV groups; None where it has no owner and no content.
    ref_count: table entries that name it, and steps in flight that may still read or copy it.
    heat: how often its content was used since it was computed; 0 without findable content.
    fill: computed tokens in it, of the owner that has most; without an owner, tokens of its
        content; None where neither is known.
    """

    block: int
    state: BlockState
    group: int | None
    ref_count: int
    owners: tuple[Owner, ...]
    heat: int
    fill: int | None


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks from first_block on, in order, of a pool of num_blocks; block_size: tokens."""

    num_blocks: int
    block_size: int
    first_block: int
    blocks: tuple[BlockUse, ...]


def block_map(
    memory: KVCacheManager,
    live: Iterable[Sequence],
    first_block: int = 0,
    max_num_blocks: int | None = None,
) -> BlockMap:
    """At most max_num_blocks blocks from first_block on; None for all. Past the end there are none.

    live: all sequences that may hold blocks, whether they run or wait.
    """
    assert first_block >= 0 and (max_num_blocks is None or max_num_blocks >= 0)
    live = list(live)
    num_blocks = memory.pool.num_blocks
    num_wanted = num_blocks if max_num_blocks is None else max_num_blocks
    told = range(first_block, min(num_blocks, first_block + num_wanted))
    owners, groups = _owners(live, told)
    fill = Holdings(memory, live).fill
    blocks = tuple(
        _use(memory, block, owners.get(block, []), groups.get(block), fill.get(block, 0))
        for block in told
    )
    return BlockMap(num_blocks, memory.block_size, first_block, blocks)


def _owners(live: Iterable[Sequence], told: range) -> tuple[dict[int, list[Owner]], dict[int, int]]:
    owners: dict[int, list[Owner]] = {}
    groups: dict[int, int] = {}
    for sequence in live:
        owner = sequence.request_id, sequence.branch_index
        for group, table in enumerate(sequence.block_tables):
            for block in table:
                if block != HOLE_BLOCK and block in told:
                    owners.setdefault(block, []).append(owner)
                    groups[block] = group
    return owners, groups


def _use(
    memory: KVCacheManager, block: int, owners: list[Owner], group: int | None, fill: int
) -> BlockUse:
    pool = memory.pool
    content = pool.content[block]
    if pool.ref_count[block]:
        state = BlockState.HELD
    else:
        state = BlockState.FREE if content is None else BlockState.CACHED
    num_filled: int | None = fill if owners else None
    if not owners and content is not None:
        group, num_filled = content[0], memory.cache.num_tokens(content[1])
    return BlockUse(
        block=block,
        state=state,
        group=group,
        ref_count=pool.ref_count[block],
        owners=tuple(owners),
        heat=pool.heat(block),
        fill=num_filled,
    )
