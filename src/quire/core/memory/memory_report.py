"""Reports of the KV memory: bytes by use, and each block's state.

Every block of the pool counts once, even if several sequences hold it:

    useful      slots with keys and values of computed tokens; states after computed tokens
    unfilled    the empty slots of partly filled blocks
    unused      parts of held blocks that no layer uses: all blocks have one size, though the layers
                of KV groups need different amounts
    reserved    blocks that a table holds without a computed token in them
    in flight   blocks that only steps in flight hold, which may still read or copy them
    moving      blocks that only moves between tiers hold: being stored or filled, or filled for a
                sequence that waits
    cached      free blocks whose content a prompt may find
    free        the rest

Only reads the manager and the unfinished sequences. It costs O(held blocks), so it serves reports
on request and benchmarks, and never runs in a step. Called by `engine.engine`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK

PARTS = ("useful", "unfilled", "unused", "reserved", "in_flight", "moving", "cached", "free")
HELD_PARTS = PARTS[:6]

_BAR_WIDTH = 40
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """Bytes that the sequences of one tenant hold.

    A block with several holders is split evenly among them, so that the numbers of all tenants add
    up to those of the report.
    """

    #: Number of the tenant's sequences that hold blocks.
    num_sequences: int
    useful_bytes: float
    unfilled_bytes: float
    reserved_bytes: float
    unused_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of the KV memory by use; the module's docstring explains the uses.

    Printing a report shows a table. Tokens that a step in flight computes count as computed.
    """

    useful_bytes: int
    unfilled_bytes: int
    unused_bytes: int
    reserved_bytes: int
    in_flight_bytes: int
    moving_bytes: int
    cached_bytes: int
    free_bytes: int
    #: The part of reserved_bytes for tokens that are not known yet. The rest is for known tokens
    #: that are not computed yet.
    lookahead_bytes: int
    #: Additional bytes that the same sequences would take if they shared no blocks.
    saved_bytes: int
    #: Memory by tenant; requests without a tenant have the name "".
    tenants: dict[str, TenantMemory]
    #: Counts of the tiers behind the KV memory (`BlockMoves.counts`); empty without tiers.
    tiers: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part named in PARTS; they add up to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in PARTS}

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def useful_share(self) -> float | None:
        """Useful bytes as a share of held bytes (all that are neither cached nor free); None if no
        bytes are held."""
        return useful_share(self.parts)

    @property
    def saved_share(self) -> float:
        """Saved bytes as a share of the bytes of all tables without sharing; 0 if the tables are
        empty."""
        held = self.useful_bytes + self.unfilled_bytes + self.unused_bytes + self.reserved_bytes
        alone = held + self.saved_bytes
        return self.saved_bytes / alone if alone else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON-compatible dict."""
        return {
            "total_bytes": self.total_bytes,
            **{f"{name}_bytes": num_bytes for name, num_bytes in self.parts.items()},
            "lookahead_bytes": self.lookahead_bytes,
            "saved_bytes": self.saved_bytes,
            "useful_share": self.useful_share,
            "saved_share": self.saved_share,
            "tenants": {
                name: {
                    "num_sequences": use.num_sequences,
                    "useful_bytes": use.useful_bytes,
                    "unfilled_bytes": use.unfilled_bytes,
                    "reserved_bytes": use.reserved_bytes,
                    "unused_bytes": use.unused_bytes,
                }
                for name, use in self.tenants.items()
            },
            "tiers": self.tiers,
        }

    def __str__(self) -> str:
        lines = [memory_table(self.parts, self.saved_bytes)]
        if any(self.tenants):
            lines += [
                f"{name or '(no tenant)'}: {use.num_sequences} sequences,"
                f" useful {format_bytes(use.useful_bytes)},"
                f" unfilled {format_bytes(use.unfilled_bytes)},"
                f" unused {format_bytes(use.unused_bytes)},"
                f" reserved {format_bytes(use.reserved_bytes)}"
                for name, use in sorted(self.tenants.items())
            ]
        lines += [
            f"stored in tier {name}: {format_bytes(counts['used_bytes'])}"
            for name, counts in self.tiers.get("by_tier", {}).items()
            if "used_bytes" in counts
        ]
        return "\n".join(lines)


class _GroupHoldings:
    """Blocks that the tables of one KV group hold."""

    def __init__(self, group: KVGroup, block_size: int) -> None:
        #: Block -> number of table entries that name it.
        self.num_entries: Counter[int] = Counter()
        #: Block -> largest number of computed tokens that any holder has in it. Blocks without
        #: computed tokens are left out; a state's blocks count as full after its first token.
        self.fill: dict[int, int] = {}
        #: Tenant -> block -> number of table entries of the tenant's sequences that name it.
        self.by_tenant: dict[str, Counter[int]] = {}
        self._group = group
        self._size = block_size

    def add(self, table: list[int], num_computed: int, tenant: str) -> None:
        """Count a table of the group; its sequence has num_computed computed tokens."""
        size, fill = self._size, self.fill
        self.num_entries.update(table)
        self.by_tenant.setdefault(tenant, Counter()).update(table)
        if self._group.kind is KVKind.STATE:
            if num_computed:
                fill.update(dict.fromkeys(table, size))
            return
        num_full, offset = divmod(num_computed, size)
        fill.update(dict.fromkeys(table[:num_full], size))
        if offset:
            fill[table[num_full]] = max(offset, fill.get(table[num_full], 0))

    def drop_holes(self) -> None:
        """Remove the entries of holes, which are not blocks."""
        for counts in (self.num_entries, self.fill, *self.by_tenant.values()):
            counts.pop(HOLE_BLOCK, None)

    def held_bytes(self) -> tuple[int, int, int, int]:
        """Useful, unfilled, unused and reserved bytes, which add up to the size of the held
        blocks."""
        block_bytes, num_held = self._group.bytes_per_block, len(self.num_entries)
        per_state = max(1, self._group.num_state_blocks)
        unused = num_held * self._group.unused_bytes // per_state
        unused_of_filled = len(self.fill) * self._group.unused_bytes // per_state
        filled = len(self.fill) * block_bytes - unused_of_filled
        num_slots = len(self.fill) * self._size
        useful = sum(self.fill.values()) * filled // num_slots if num_slots else 0
        return useful, filled - useful, unused, num_held * block_bytes - unused - filled

    def tenant_bytes(self, tenant: str) -> tuple[float, float, float, float]:
        """The tenant's part of `held_bytes`, each block split evenly among its entries."""
        size, counts = self._size, self.by_tenant.get(tenant, Counter())
        unused_bytes = self._group.unused_bytes / max(1, self._group.num_state_blocks)
        slot_bytes = (self._group.bytes_per_block - unused_bytes) / size
        useful = unfilled = unused = reserved = 0.0
        # First count equal blocks, without a Python step for each: there may be 100,000s.
        fills, num_entries = map(self.fill.get, counts), map(self.num_entries.get, counts)
        alike = Counter(zip(counts.values(), num_entries, fills, strict=True))
        for (count, num_all, num_filled), num_blocks in alike.items():
            assert num_all is not None, "a tenant's entries are among all entries"
            part = num_blocks * count / num_all
            unused += part * unused_bytes
            if num_filled:
                useful += part * num_filled * slot_bytes
                unfilled += part * (size - num_filled) * slot_bytes
            else:
                reserved += part * size * slot_bytes
        return useful, unfilled, unused, reserved


class Holdings:
    """Blocks that tables hold: an intermediate result of the report and of the block map."""

    def __init__(self, memory: KVCacheManager, live: Iterable[Sequence]) -> None:
        size = memory.block_size
        #: Holdings by KV group.
        self.groups = [_GroupHoldings(group, size) for group in memory.config.groups]
        #: Blocks reserved for tokens that are not known yet.
        self.lookahead: set[int] = set()
        self.num_sequences: Counter[str] = Counter()
        self.num_padding_blocks: Counter[str] = Counter()
        self._kinds = [group.kind for group in memory.config.groups]
        self._size = size
        for sequence in live:
            if sequence.block_tables:
                self._add(sequence)
                self.num_padding_blocks[sequence.tenant] += memory.padding.get(sequence, 0)
        for group in self.groups:
            group.drop_holes()
            self.lookahead -= group.fill.keys()
        self.lookahead.discard(HOLE_BLOCK)

    def blocks(self) -> set[int]:
        """All blocks that a table names."""
        found: set[int] = set()
        return found.union(*(group.num_entries for group in self.groups))

    def _add(self, sequence: Sequence) -> None:
        num_known = -(-sequence.num_tokens // self._size)
        self.num_sequences[sequence.tenant] += 1
        tables = zip(self._kinds, self.groups, sequence.block_tables, strict=True)
        for kind, group, table in tables:
            group.add(table, sequence.num_computed_tokens, sequence.tenant)
            if kind is not KVKind.STATE:
                self.lookahead.update(table[num_known:])

    def tenant_memory(self, tenant: str, block_bytes: int) -> TenantMemory:
        """The memory of one tenant."""
        parts = zip(*(group.tenant_bytes(tenant) for group in self.groups), strict=True)
        useful, unfilled, unused, reserved = map(sum, parts)
        return TenantMemory(
            num_sequences=self.num_sequences[tenant],
            useful_bytes=useful,
            unfilled_bytes=unfilled,
            reserved_bytes=reserved + self.num_padding_blocks[tenant] * block_bytes,
            unused_bytes=unused,
        )


def memory_report(memory: KVCacheManager, live: Iterable[Sequence]) -> MemoryReport:
    """Report the memory as it is now; live: all sequences that may hold blocks, running or waiting.

    Padding (see `KVCacheManager`) is free to the pool, but counts as reserved.
    """
    # First, collect the blocks that tables, steps in flight and moves hold.
    holdings = Holdings(memory, live)
    pool, held_blocks = memory.pool, holdings.blocks()
    block_bytes = memory.config.groups[0].bytes_per_block
    leaving = [table for ended in memory.leaving for table in ended.block_tables]
    in_flight = {*memory.deferred.blocks(), *chain(*leaving)} - held_blocks - {HOLE_BLOCK}
    moves = memory.moves
    moving = set(() if moves is None else moves.blocks()) - held_blocks - in_flight
    contents = map(pool.content.__getitem__, chain(in_flight, held_blocks, moving))
    num_cached = len(memory.cache) - sum(content is not None for content in contents)
    # Then count padding and bytes.
    num_padding = holdings.num_padding_blocks.total()
    num_padding_leaving = memory.num_padding_blocks - num_padding
    num_entries = sum(group.num_entries.total() for group in holdings.groups)
    by_group = zip(*(group.held_bytes() for group in holdings.groups), strict=True)
    useful_bytes, unfilled_bytes, unused_bytes, reserved_bytes = map(sum, by_group)
    return MemoryReport(
        useful_bytes=useful_bytes,
        unfilled_bytes=unfilled_bytes,
        unused_bytes=unused_bytes,
        reserved_bytes=reserved_bytes + num_padding * block_bytes,
        in_flight_bytes=(len(in_flight) + num_padding_leaving) * block_bytes,
        moving_bytes=len(moving) * block_bytes,
        cached_bytes=num_cached * block_bytes,
        free_bytes=(pool.num_free - num_cached - num_padding - num_padding_leaving) * block_bytes,
        lookahead_bytes=(len(holdings.lookahead) + num_padding) * block_bytes,
        saved_bytes=(num_entries - len(held_blocks)) * block_bytes,
        tenants={
            name: holdings.tenant_memory(name, block_bytes) for name in holdings.num_sequences
        },
        tiers={} if moves is None else moves.counts(),
    )


def useful_share(parts: Mapping[str, float]) -> float | None:
    """Useful bytes as a share of held bytes; None if no bytes are held. parts: bytes by PARTS."""
    num_held = sum(parts[name] for name in HELD_PARTS)
    return parts["useful"] / num_held if num_held else None


def memory_table(parts: Mapping[str, float], saved_bytes: float) -> str:
    """Parts as lines with bars, and a summary. parts: bytes by PARTS."""
    total = sum(parts.values())
    lines = [
        f"{name.replace('_', ' '):<10}{format_bytes(num_bytes):>12}{num_bytes / total:>8.1%}"
        f"  {'#' * round(_BAR_WIDTH * num_bytes / total)}".rstrip()
        for name, num_bytes in parts.items()
    ]
    lines.append(f"{'total':<10}{format_bytes(total):>12}")
    share = useful_share(parts)
    if share is not None:
        lines.append(
            f"{share:.1%} of what is held is useful; sharing saves {format_bytes(saved_bytes)}"
        )
    return "\n".join(lines)


def format_bytes(num_bytes: float) -> str:
    """A size for people: at least three digits, with the unit."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.1f} {_UNITS[power]}" if power else f"{num_bytes:.0f} B"


Owner = tuple[str, int]
"""(request id, branch index) of a sequence."""


class BlockState(Enum):
    """The state of a block in the pool."""

    HELD = "held"  # by tables, or only by steps in flight (then without owners)
    CACHED = "cached"  # free, with content that a prompt may find
    FREE = "free"


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The use of one block."""

    block: int
    state: BlockState
    #: KV group whose tokens or state the block holds; None for a block without owner and content.
    group: int | None
    #: Number of table entries with the block, plus number of steps in flight that may still read or
    #: copy it.
    ref_count: int
    owners: tuple[Owner, ...]
    #: Number of uses of its content since the content was computed; 0 without cached content.
    heat: int
    #: Number of computed tokens in the block: the largest over its owners or, without an owner, the
    #: number in its cached content. None if it is unknown, or if the block holds part of a state.
    fill: int | None
    #: Kind of the group.
    kind: KVKind | None = None


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A range of the pool's blocks, in order."""

    #: Number of blocks in the pool.
    num_blocks: int
    #: Number of tokens in a block.
    block_size: int
    #: Id of the first block in `blocks`.
    first_block: int
    blocks: tuple[BlockUse, ...]


def block_map(
    memory: KVCacheManager,
    live: Iterable[Sequence],
    first_block: int = 0,
    max_num_blocks: int | None = None,
) -> BlockMap:
    """Report up to max_num_blocks blocks (None: all) from first_block on; empty past the pool's
    end.

    live: all sequences that may hold blocks, running or waiting.
    """
    assert first_block >= 0 and (max_num_blocks is None or max_num_blocks >= 0)
    live = list(live)
    num_blocks = memory.pool.num_blocks
    num_wanted = num_blocks if max_num_blocks is None else max_num_blocks
    shown = range(first_block, min(num_blocks, first_block + num_wanted))
    owners, groups = _owners(live, shown)
    fills = [group.fill for group in Holdings(memory, live).groups]
    blocks = tuple(_block_use(memory, block, owners, groups, fills) for block in shown)
    return BlockMap(num_blocks, memory.block_size, first_block, blocks)


def _owners(
    live: Iterable[Sequence], shown: range
) -> tuple[dict[int, list[Owner]], dict[int, int]]:
    owners: dict[int, list[Owner]] = {}
    groups: dict[int, int] = {}
    for sequence in live:
        owner = sequence.request_id, sequence.branch_index
        for group, table in enumerate(sequence.block_tables):
            for block in table:
                if block != HOLE_BLOCK and block in shown:
                    owners.setdefault(block, []).append(owner)
                    groups[block] = group
    return owners, groups


def _block_use(
    memory: KVCacheManager,
    block: int,
    owners: Mapping[int, list[Owner]],
    groups: Mapping[int, int],
    fills: list[dict[int, int]],
) -> BlockUse:
    pool = memory.pool
    content, group = pool.content[block], groups.get(block)
    if pool.ref_count[block]:
        state = BlockState.HELD
    else:
        state = BlockState.FREE if content is None else BlockState.CACHED
    num_filled: int | None = None if group is None else fills[group].get(block, 0)
    if group is None and content is not None:
        group, num_filled = content[0], memory.cache.num_tokens(content[1])
    kind = None if group is None else memory.config.groups[group].kind
    return BlockUse(
        block=block,
        state=state,
        group=group,
        ref_count=pool.ref_count[block],
        owners=tuple(owners.get(block, ())),
        heat=pool.heat(block),
        fill=None if kind is KVKind.STATE else num_filled,
        kind=kind,
    )
