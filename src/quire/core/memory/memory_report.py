"""Reports of the KV memory: bytes by use, and each block's state.

Every block of the pool counts once, however many hold it:

    useful      slots with keys and values of computed tokens; states of sequences that have some
    unfilled    the empty slots of partly filled blocks
    unused      what no layer uses of the blocks that tables hold: all are of one size, though the
                layers of KV groups need different amounts
    reserved    blocks that a table holds without a computed token in them
    in flight   blocks that only steps in flight hold, which may still read or copy them
    moving      blocks that only moves between tiers hold: being filled, or stored, or filled for a
                sequence that waits
    cached      free blocks whose content a prompt may find
    free        the rest

Reads a manager and the sequences that live, changes nothing. Costs O(held blocks): for reports on
request and benchmarks that sample, never for a step. Called by `engine.engine`.
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
    """What the sequences of one tenant hold, in bytes.

    A block with several holders is split evenly among them, so that the parts of all tenants add up
    to those of the whole. num_sequences: of this tenant, with blocks.
    """

    num_sequences: int
    useful_bytes: float
    unfilled_bytes: float
    reserved_bytes: float
    unused_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of the KV memory by what they do; see the module's text. `print` shows a table.

    Tokens that a step in flight computes count as computed.

    lookahead_bytes: of reserved_bytes, what is reserved for tokens that are not known yet; the
        others wait for known tokens to be computed.
    saved_bytes: what the same holders would take besides if none shared a block with another.
    tenants: by name; that of requests without one is "".
    tiers: of the tiers behind the KV memory what `BlockMoves.counts` says; empty where there are
        none.
    """

    useful_bytes: int
    unfilled_bytes: int
    unused_bytes: int
    reserved_bytes: int
    in_flight_bytes: int
    moving_bytes: int
    cached_bytes: int
    free_bytes: int
    lookahead_bytes: int
    saved_bytes: int
    tenants: dict[str, TenantMemory]
    tiers: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by PARTS, which add up to total_bytes."""
        return {name: getattr(self, f"{name}_bytes") for name in PARTS}

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def useful_share(self) -> float | None:
        """Useful bytes of those that are held: neither cached nor free. None where none are."""
        return useful_share(self.parts)

    @property
    def saved_share(self) -> float:
        """Saved bytes of those that tables would take without sharing; 0 where they take none."""
        held = self.useful_bytes + self.unfilled_bytes + self.unused_bytes + self.reserved_bytes
        alone = held + self.saved_bytes
        return self.saved_bytes / alone if alone else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it by name, as JSON can hold it."""
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
            f"behind it, on {name}: {format_bytes(counts['used_bytes'])}"
            for name, counts in self.tiers.get("by_tier", {}).items()
            if "used_bytes" in counts
        ]
        return "\n".join(lines)


class _GroupHoldings:
    """What the tables of one KV group hold.

    num_entries: block -> table entries that name it. fill: block -> computed tokens in it, of the
    holder that has most; blocks without any are not in it. A state's blocks are full as soon as it
    is that after some token. by_tenant: as num_entries, of the tenant's sequences.
    """

    def __init__(self, group: KVGroup, block_size: int) -> None:
        self.num_entries: Counter[int] = Counter()
        self.fill: dict[int, int] = {}
        self.by_tenant: dict[str, Counter[int]] = {}
        self._group = group
        self._size = block_size

    def add(self, table: list[int], num_computed: int, tenant: str) -> None:
        """A table of the group, of a sequence with so many computed tokens."""
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
        """Holes are no blocks."""
        for counts in (self.num_entries, self.fill, *self.by_tenant.values()):
            counts.pop(HOLE_BLOCK, None)

    def held_bytes(self) -> tuple[int, int, int, int]:
        """Useful, unfilled, unused and reserved bytes, which add up to those of the blocks held."""
        block_bytes, num_held = self._group.bytes_per_block, len(self.num_entries)
        per_state = max(1, self._group.num_state_blocks)
        unused = num_held * self._group.unused_bytes // per_state
        unused_of_filled = len(self.fill) * self._group.unused_bytes // per_state
        filled = len(self.fill) * block_bytes - unused_of_filled
        num_slots = len(self.fill) * self._size
        useful = sum(self.fill.values()) * filled // num_slots if num_slots else 0
        return useful, filled - useful, unused, num_held * block_bytes - unused - filled

    def tenant_bytes(self, tenant: str) -> tuple[float, float, float, float]:
        """Its part of `held_bytes`, each block split evenly among its entries."""
        size, counts = self._size, self.by_tenant.get(tenant, Counter())
        unused_bytes = self._group.unused_bytes / max(1, self._group.num_state_blocks)
        slot_bytes = (self._group.bytes_per_block - unused_bytes) / size
        useful = unfilled = unused = reserved = 0.0
        # Alike blocks are counted first, without a Python step for each: there may be 100,000s.
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
    """What tables hold: an intermediate of the report and of the block map.

    groups: by KV group. lookahead: blocks for unknown tokens.
    """

    def __init__(self, memory: KVCacheManager, live: Iterable[Sequence]) -> None:
        size = memory.block_size
        self.groups = [_GroupHoldings(group, size) for group in memory.config.groups]
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
        """All that a table names."""
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
        """The part of one tenant."""
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
    """The ledger as it is now. live: all that may hold blocks, whether they run or wait.

    Padding (see `KVCacheManager`) is free to the pool, but counts as reserved.
    """
    holdings = Holdings(memory, live)
    pool, held_blocks = memory.pool, holdings.blocks()
    block_bytes = memory.config.groups[0].bytes_per_block
    leaving = [table for ended in memory.leaving for table in ended.block_tables]
    in_flight = {*memory.deferred.blocks(), *chain(*leaving)} - held_blocks - {HOLE_BLOCK}
    moves = memory.moves
    moving = set(() if moves is None else moves.blocks()) - held_blocks - in_flight
    contents = map(pool.content.__getitem__, chain(in_flight, held_blocks, moving))
    num_cached = len(memory.cache) - sum(content is not None for content in contents)
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
    """Useful bytes of those that are held; None where none are. parts: by PARTS."""
    num_held = sum(parts[name] for name in HELD_PARTS)
    return parts["useful"] / num_held if num_held else None


def memory_table(parts: Mapping[str, float], saved_bytes: float) -> str:
    """Parts as lines with bars, and what is to say of the whole. parts: bytes by PARTS."""
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
    """A size for people: three digits or more, with the unit."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.1f} {_UNITS[power]}" if power else f"{num_bytes:.0f} B"


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

    group: the KV group whose tokens, or state, it holds; None where it has no owner and no content.
    kind: of that group.
    ref_count: table entries that name it, and steps in flight that may still read or copy it.
    heat: how often its content was used since it was computed; 0 without findable content.
    fill: computed tokens in it, of the owner that has most; without an owner, tokens of its
        content; None where neither is known, and where it holds a part of a state: that is of
        one size however many tokens led to it.
    """

    block: int
    state: BlockState
    group: int | None
    ref_count: int
    owners: tuple[Owner, ...]
    heat: int
    fill: int | None
    kind: KVKind | None = None


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
    shown = range(first_block, min(num_blocks, first_block + num_wanted))
    owners, groups = _owners(live, shown)
    fills = [group.fill for group in Holdings(memory, live).groups]
    blocks = tuple(_use(memory, block, owners, groups, fills) for block in shown)
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


def _use(
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
