"""Converts a map of KV blocks to plain data for messages and JSON, in pages.

Called by `engine_process.engine_loop`.
"""

from collections.abc import Iterable
from typing import Any

from quire.core.memory.memory_report import BlockMap, BlockUse, Owner

MAX_PAGE_OWNERS = 1_000_000
"""A page ends with the block at which its owners reach this number; it then takes some tens of
MiB."""


def block_page(found: BlockMap, max_num_owners: int = MAX_PAGE_OWNERS) -> dict[str, Any]:
    """One page of the blocks in `found`, with at least one block if `found` has any.

    In the result, `next_block` is the first block of the next page, None at the end of the pool.
    `sequences` lists [request id, branch index] pairs; the `owners` of a block are indices into it.
    """
    places: dict[Owner, int] = {}
    blocks = [_entry(use, places) for use in _bounded(found.blocks, max_num_owners)]
    next_block = found.first_block + len(blocks)
    return {
        "num_blocks": found.num_blocks,
        "block_size": found.block_size,
        "first_block": found.first_block,
        "next_block": next_block if next_block < found.num_blocks else None,
        "sequences": [list(owner) for owner in places],
        "blocks": blocks,
    }


def _bounded(uses: Iterable[BlockUse], max_num_owners: int) -> Iterable[BlockUse]:
    num_owners = 0
    for use in uses:
        yield use
        num_owners += len(use.owners)
        if num_owners >= max_num_owners:
            return


def _entry(use: BlockUse, places: dict[Owner, int]) -> dict[str, Any]:
    return {
        "block": use.block,
        "state": use.state.value,
        "group": use.group,
        "kind": None if use.kind is None else use.kind.value,
        "ref_count": use.ref_count,
        "owners": [places.setdefault(owner, len(places)) for owner in use.owners],
        "heat": use.heat,
        "fill": use.fill,
    }
