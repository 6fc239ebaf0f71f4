"""The ledger: exact bytes in situations made by hand, and its laws under random operations."""

import random
from collections import Counter
from dataclasses import fields

import pytest
from tests.core.harness import make_memory, make_sequence
from tests.core.memory.memory_world import World
from tests.core.memory.test_memory_machine import act

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.memory_report import (
    PARTS,
    BlockState,
    BlockUse,
    MemoryReport,
    TenantMemory,
    block_map,
    format_bytes,
    memory_report,
    memory_table,
    useful_share,
)
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK

BLOCK = 64  # bytes of a block in `make_groups`


def admitted(
    memory: KVCacheManager, length: int, num_computed: int, *, tenant: str = "", first: int = 1
) -> Sequence:
    sequence = make_sequence(memory, range(first, first + length))
    memory.admit(sequence, memory.match(sequence), step_id=0)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_computed
    sequence.tenant = tenant
    return sequence


def parts(report: MemoryReport) -> tuple[int, ...]:
    """In blocks' bytes: useful, unfilled, reserved, in flight, cached, free; nothing else."""
    assert report.unused_bytes == report.moving_bytes == 0
    return tuple(size for name, size in report.parts.items() if name not in ("unused", "moving"))


def test_an_empty_memory_is_free() -> None:
    report = memory_report(make_memory(16), [])
    assert parts(report) == (0, 0, 0, 0, 0, 16 * BLOCK)
    assert report.total_bytes == 16 * BLOCK
    assert report.useful_share is None and report.saved_share == 0.0 and report.tenants == {}


def test_one_sequence_in_the_middle_of_its_prompt() -> None:
    """10 tokens in 3 blocks of 4; 6 are computed: 2 slots of the second and the third are empty."""
    memory = make_memory(16)
    report = memory_report(memory, [admitted(memory, 10, 6)])
    token = BLOCK // 4
    assert parts(report) == (6 * token, 2 * token, BLOCK, 0, 0, 13 * BLOCK)
    assert report.lookahead_bytes == 0 and report.saved_bytes == 0
    assert report.useful_share == 6 / 12
    assert report.tenants == {"": TenantMemory(1, 6 * token, 2 * token, BLOCK)}


def test_every_group_counts() -> None:
    memory = make_memory(16, num_groups=2)
    report = memory_report(memory, [admitted(memory, 10, 6)])
    token = BLOCK // 4
    assert parts(report) == (12 * token, 4 * token, 2 * BLOCK, 0, 0, 10 * BLOCK)


def test_lookahead_is_counted_apart_from_what_waits_to_be_computed() -> None:
    memory = make_memory(16, num_groups=2)
    sequence = admitted(memory, 8, 4)  # one block of each group is yet to be computed
    assert memory.grow(sequence, 9, num_extra_blocks=2) is not None
    report = memory_report(memory, [sequence])
    assert report.reserved_bytes == (1 + 3) * 2 * BLOCK
    assert report.lookahead_bytes == 3 * 2 * BLOCK
    assert report.total_bytes == 16 * BLOCK


def test_bytes_that_slots_do_not_divide_add_up_all_the_same() -> None:
    memory = make_memory(5, block_size=7)  # 64 bytes for 7 tokens
    report = memory_report(memory, [admitted(memory, 20, 16)])
    assert report.useful_bytes == 16 * BLOCK // 7
    assert report.useful_bytes + report.unfilled_bytes == 3 * BLOCK
    assert report.total_bytes == 5 * BLOCK


def make_hybrid(num_blocks: int = 32) -> KVCacheManager:
    """Blocks of 4 tokens and 64 bytes: full, of a window of 6 (8 of a block unused), and states of
    three blocks (40 of all of them unused)."""
    groups = (
        KVGroup((0, 1), KVKind.FULL, BLOCK),
        KVGroup((2,), KVKind.WINDOW, BLOCK, window=6, unused_bytes=8),
        KVGroup((0, 1, 2), KVKind.STATE, BLOCK, num_state_blocks=3, unused_bytes=40),
    )
    return KVCacheManager(KVCacheConfig(groups, num_blocks, 4, enable_prefix_caching=False))


def holding(
    memory: KVCacheManager, *tables: list[int], num_computed: int, tenant: str = "", index: int = 0
) -> Sequence:
    """A sequence of 14 tokens with these tables, which were taken from the pool by hand."""
    sequence = make_sequence(memory, range(1, 15), name=f"{tenant}{index}")
    sequence.block_tables = tables
    sequence.num_computed_tokens = num_computed
    sequence.tenant = tenant
    return sequence


def test_each_group_counts_by_its_own_rule() -> None:
    """14 tokens, 13 of them computed: the window has passed the first block."""
    memory = make_hybrid()
    full, window, state = (memory.pool.take(count)[0] for count in (4, 3, 3))
    window = [HOLE_BLOCK, *window]
    sequence = holding(memory, full, window, state, num_computed=13)
    report = memory_report(memory, [sequence])
    slot = 56 // 4  # of a block of the window's
    assert report.useful_bytes == 13 * 16 + (2 * 4 + 1) * slot + 3 * BLOCK - 40
    assert report.unfilled_bytes == 3 * 16 + 3 * slot
    assert report.unused_bytes == 3 * 8 + 40
    assert report.reserved_bytes == report.lookahead_bytes == 0
    assert report.free_bytes == 22 * BLOCK and report.total_bytes == 32 * BLOCK
    tenant = report.tenants[""]
    assert tenant.unused_bytes == pytest.approx(report.unused_bytes)
    assert tenant.useful_bytes == pytest.approx(report.useful_bytes)


def test_a_state_is_reserved_until_it_is_that_after_a_token() -> None:
    memory = make_hybrid()
    full, window, state = (memory.pool.take(count)[0] for count in (4, 4, 3))
    sequence = holding(memory, full, window, state, num_computed=0)
    report = memory_report(memory, [sequence])
    assert (report.useful_bytes, report.unfilled_bytes) == (0, 0)
    assert report.reserved_bytes == 4 * BLOCK + 4 * (BLOCK - 8) + 3 * BLOCK - 40
    assert report.unused_bytes == 4 * 8 + 40 and report.lookahead_bytes == 0


def test_shared_states_count_once_with_what_is_unused_of_them() -> None:
    memory = make_hybrid()
    full, window, state = (memory.pool.take(count)[0] for count in (4, 4, 3))
    live = [
        holding(memory, list(full), list(window), list(state), num_computed=14, tenant=name)
        for name in ("a", "b")
    ]
    report = memory_report(memory, live)
    assert report.unused_bytes == 4 * 8 + 40
    assert report.saved_bytes == 11 * BLOCK
    for name in ("useful_bytes", "unfilled_bytes", "unused_bytes", "reserved_bytes"):
        parts = [getattr(use, name) for use in report.tenants.values()]
        assert parts[0] == parts[1] and sum(parts) == pytest.approx(getattr(report, name))


def test_the_map_says_what_kind_of_memory_a_block_is() -> None:
    memory = make_hybrid(12)
    full, window, state = (memory.pool.take(count)[0] for count in (2, 1, 3))
    sequence = holding(memory, full, [HOLE_BLOCK, *window], state, num_computed=7, tenant="t")
    for block in [*full, *window, *state]:
        assert memory.pool.ref_count[block] == 1
    uses = block_map(memory, [sequence]).blocks
    assert [(uses[b].group, uses[b].kind, uses[b].fill) for b in full] == [
        (0, KVKind.FULL, 4),
        (0, KVKind.FULL, 3),
    ]
    assert (uses[window[0]].kind, uses[window[0]].fill) == (KVKind.WINDOW, 3)
    for block in state:
        assert (uses[block].group, uses[block].kind, uses[block].fill) == (2, KVKind.STATE, None)
        assert uses[block].owners == (("t0", 0),)
    assert {use.kind for use in uses} == {None, KVKind.FULL, KVKind.WINDOW, KVKind.STATE}


def fork(memory: KVCacheManager, parent: Sequence, index: int) -> Sequence:
    child = parent.branch(index, parent.params)
    memory.fork(child, parent)
    return child


def test_shared_blocks_count_once_and_are_split_among_tenants() -> None:
    """Three branches of 6 tokens in 2 blocks each; one belongs to another tenant."""
    memory = make_memory(16)
    parent = admitted(memory, 6, 6, tenant="a")
    children = [fork(memory, parent, 1), fork(memory, parent, 2)]
    children[1].tenant = "b"
    report = memory_report(memory, [parent, *children])
    assert parts(report) == (96, 32, 0, 0, 0, 14 * BLOCK)
    assert report.saved_bytes == 4 * BLOCK and report.saved_share == 4 / 6
    assert report.tenants["a"] == TenantMemory(2, pytest.approx(64.0), pytest.approx(64 / 3), 0.0)
    assert report.tenants["b"] == TenantMemory(1, pytest.approx(32.0), pytest.approx(32 / 3), 0.0)


def test_shared_block_counts_its_most_written_tokens() -> None:
    """After a step that failed, one of two branches may have fallen back behind the other."""
    memory = make_memory(16)
    parent = admitted(memory, 6, 6)
    child = fork(memory, parent, 1)
    for first, second in ((parent, child), (child, parent)):
        first.num_computed_tokens, second.num_computed_tokens = 4, 6
        assert parts(memory_report(memory, [parent, child]))[:3] == (96, 32, 0)


def test_a_prompt_found_in_the_cache_saves_its_blocks() -> None:
    memory = make_memory(16)
    first = admitted(memory, 10, 10)
    memory.publish(first, 10)
    second = make_sequence(memory, [*range(1, 9), 99, 99])
    memory.admit(second, memory.match(second), step_id=0)
    report = memory_report(memory, [first, second])
    # 10 + 2 * 0 tokens in three blocks, and one block for what the second is yet to compute.
    assert parts(report) == (10 * 16, 2 * 16, BLOCK, 0, 0, 12 * BLOCK)
    assert report.saved_bytes == 2 * BLOCK


def test_an_ended_sequence_leaves_cached_blocks_and_blocks_in_flight() -> None:
    memory = make_memory(16)
    sequence = admitted(memory, 10, 10)
    memory.publish(sequence, 8)
    sequence.last_step_id = 3
    memory.free(sequence)  # its tail, partly filled, is findable as well
    assert parts(memory_report(memory, [])) == (0, 0, 0, 3 * BLOCK, 0, 13 * BLOCK)
    memory.end_step(3)
    assert parts(memory_report(memory, [])) == (0, 0, 0, 0, 3 * BLOCK, 13 * BLOCK)
    revived = admitted(memory, 9, 8)
    report = memory_report(memory, [revived])
    assert parts(report) == (2 * BLOCK, 0, BLOCK, 0, BLOCK, 12 * BLOCK)


def test_a_copied_block_is_in_flight_only_if_it_has_no_other_holder() -> None:
    memory = make_memory(16)
    parent = admitted(memory, 6, 6)
    child = fork(memory, parent, 1)
    memory.copy_on_write.copy(child, step_id=1)
    report = memory_report(memory, [parent, child])
    assert parts(report) == (4 * 16 + 2 * 2 * 16, 2 * 2 * 16, 0, 0, 0, 13 * BLOCK)
    memory.free(parent)
    assert memory_report(memory, [child]).in_flight_bytes == BLOCK
    memory.end_step(1)
    assert memory_report(memory, [parent, child]).in_flight_bytes == 0


def test_a_preempted_sequence_counts_with_what_it_keeps() -> None:
    """Its tail is given up, half of it while a step still reads it."""
    memory = make_memory(8)
    sequence = admitted(memory, 15, 14)
    memory.truncate(sequence, 3)
    sequence.last_step_id = 5
    memory.truncate(sequence, 2)
    report = memory_report(memory, [sequence])
    assert parts(report) == (2 * BLOCK, 0, 0, BLOCK, 0, 5 * BLOCK)
    assert report.useful_share == 2 / 3


# ---- laws -------------------------------------------------------------------------------------


def reported_block_by_block(memory: KVCacheManager, live: list[Sequence]) -> dict[str, float]:
    """The same in slots, by a look at each block of the pool."""
    size = memory.block_size
    slots = dict.fromkeys(PARTS, 0)
    for block in range(memory.pool.num_blocks):
        fills = [
            min(max(sequence.num_computed_tokens - index * size, 0), size)
            for sequence in live
            for table in sequence.block_tables
            for index, entry in enumerate(table)
            if entry == block
        ]
        if fills and max(fills):
            slots["useful"] += max(fills)
            slots["unfilled"] += size - max(fills)
        elif fills:
            slots["reserved"] += size
        elif memory.pool.ref_count[block]:
            slots["in_flight"] += size
        else:
            slots["free" if memory.pool.content[block] is None else "cached"] += size
    return {part: count * BLOCK / size for part, count in slots.items()}


def check(world: World) -> MemoryReport:
    for sequence in world.live:
        sequence.tenant = "abc"[int(sequence.request_id.removeprefix("r")) % 3]
    report = memory_report(world.memory, world.live)
    assert report.parts == reported_block_by_block(world.memory, world.live)
    assert report.total_bytes == world.memory.pool.num_blocks * BLOCK
    assert 0 <= report.lookahead_bytes <= report.reserved_bytes
    tables = [table for sequence in world.live for table in sequence.block_tables]
    num_entries, num_held = sum(map(len, tables)), len(set().union(*tables))
    assert report.saved_bytes == (num_entries - num_held) * BLOCK
    for name in ("useful_bytes", "unfilled_bytes", "unused_bytes", "reserved_bytes"):
        of_tenants = sum(getattr(use, name) for use in report.tenants.values())
        assert of_tenants == pytest.approx(getattr(report, name))
    holders = [sequence for sequence in world.live if sequence.block_tables]
    assert sum(use.num_sequences for use in report.tenants.values()) == len(holders)
    return report


def test_the_parts_are_the_whole_under_random_operations() -> None:
    """Forks, copies, preemptions, failures, overlap, up to three groups; after each operation."""
    seen = set()
    for seed in range(12):
        rng = random.Random(seed)
        world = World(rng.randint(6, 40), rng.choice([1, 2, 4]), rng.randint(1, 3), seed % 4 > 0)
        for _ in range(300):
            act(world, rng)
            report = check(world)
            seen |= {name for name, value in report.as_dict().items() if value}
        world.finish()
    assert seen >= {f"{part}_bytes" for part in (*PARTS, "saved", "lookahead")} - {
        "unused_bytes",
        "moving_bytes",
    }


# ---- how it is shown --------------------------------------------------------------------------

REPORT = MemoryReport(
    useful_bytes=700 << 20,
    unfilled_bytes=20 << 20,
    unused_bytes=0,
    reserved_bytes=0,
    in_flight_bytes=0,
    moving_bytes=0,
    cached_bytes=204 << 20,
    free_bytes=100 << 20,
    lookahead_bytes=0,
    saved_bytes=80 << 20,
    tenants={"": TenantMemory(2, 100.0, 28.0, 0.0), "team": TenantMemory(1, 2048.0, 0.0, 512.0)},
)


def test_the_table_has_a_line_for_each_part_with_its_bar() -> None:
    assert str(REPORT).splitlines() == [
        "useful       700.0 MiB   68.4%  ###########################",
        "unfilled      20.0 MiB    2.0%  #",
        "unused             0 B    0.0%",
        "reserved           0 B    0.0%",
        "in flight          0 B    0.0%",
        "moving             0 B    0.0%",
        "cached       204.0 MiB   19.9%  ########",
        "free         100.0 MiB    9.8%  ####",
        "total          1.0 GiB",
        "97.2% of what is held is useful; sharing saves 80.0 MiB",
        "(no tenant): 2 sequences, useful 100 B, unfilled 28 B, unused 0 B, reserved 0 B",
        "team: 1 sequences, useful 2.0 KiB, unfilled 0 B, unused 0 B, reserved 512 B",
    ]


def test_report_omits_absent_tenants_and_shares_of_nothing() -> None:
    memory = make_memory(16)
    report = memory_report(memory, [admitted(memory, 4, 4)])
    assert "tenant" not in str(report) and "100.0% of what is held" in str(report)
    empty = memory_table({part: 0 for part in PARTS} | {"free": 64}, 0)
    assert empty.splitlines()[-1].split() == ["total", "64", "B"]


def test_as_dict_has_every_field() -> None:
    values = REPORT.as_dict()
    for field in fields(MemoryReport):
        if field.name != "tenants":
            assert values[field.name] == getattr(REPORT, field.name)
    assert values["total_bytes"] == 1 << 30
    assert values["useful_share"] == useful_share(REPORT.parts) == 700 / 720
    assert values["saved_share"] == 80 / 800
    assert values["tenants"]["team"] == {
        "num_sequences": 1,
        "useful_bytes": 2048.0,
        "unfilled_bytes": 0.0,
        "reserved_bytes": 512.0,
        "unused_bytes": 0.0,
    }


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (3 << 40, "3.0 TiB"),
        (4096 << 40, "4096.0 TiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


# ---- the block map ------------------------------------------------------------------------------


FULL = KVKind.FULL
HELD, CACHED, FREE = BlockState.HELD, BlockState.CACHED, BlockState.FREE


def test_each_block_of_two_groups_with_two_branches() -> None:
    memory = make_memory(8, num_groups=2)
    parent = make_sequence(memory, range(1, 7), name="a")
    memory.admit(parent, memory.match(parent), step_id=0)
    parent.num_computed_tokens = parent.num_confirmed_tokens = 6
    memory.publish(parent, 6)
    child = parent.branch(3, parent.params)
    memory.fork(child, parent)
    assert memory.grow(parent, 9) is not None
    found = block_map(memory, [parent, child])
    assert (found.num_blocks, found.block_size, found.first_block) == (8, 4, 0)
    uses = {use.block: use for use in found.blocks}
    assert list(uses) == list(range(8))
    both = (("a", 0), ("a", 3))
    for group, (full, partial, empty) in enumerate(parent.block_tables):
        assert uses[full] == BlockUse(full, HELD, group, 2, both, 0, 4, FULL)
        assert uses[partial] == BlockUse(partial, HELD, group, 2, both, 0, 2, FULL)
        assert uses[empty] == BlockUse(empty, HELD, group, 1, (("a", 0),), 0, 0, FULL)
    rest = set(range(8)) - {block for table in parent.block_tables for block in table}
    for block in rest:
        assert uses[block] == BlockUse(block, FREE, None, 0, (), 0, None)


def test_a_hit_makes_a_block_hotter_and_its_content_outlives_its_owner() -> None:
    memory = make_memory(8)
    for _ in range(3):
        sequence = make_sequence(memory, range(1, 10), name="s")
        memory.admit(sequence, memory.match(sequence), step_id=0)
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = 9
        memory.publish(sequence, 9)
        first, second, _ = sequence.block_tables[0]
        memory.free(sequence)
    uses = block_map(memory, []).blocks
    assert [uses[block].heat for block in (first, second)] == [2, 2]
    for block in (first, second):
        assert (uses[block].state, uses[block].group, uses[block].owners) == (CACHED, 0, ())
        assert uses[block].ref_count == 0 and uses[block].fill == 4


def test_blocks_held_only_by_a_step_have_no_owner() -> None:
    memory = make_memory(4, caching=False)
    sequence = make_sequence(memory, range(1, 6))
    memory.admit(sequence, memory.match(sequence), step_id=0)
    blocks = set(sequence.block_tables[0])
    sequence.last_step_id = 0
    memory.free(sequence)
    for use in block_map(memory, []).blocks:
        if use.block in blocks:
            assert use == BlockUse(use.block, HELD, None, 1, (), 0, None)
        else:
            assert use.state is FREE


def test_a_part_of_the_pool_is_reported_as_in_the_whole() -> None:
    memory = make_memory(12)
    sequence = make_sequence(memory, range(1, 30))
    memory.admit(sequence, memory.match(sequence), step_id=0)
    sequence.num_computed_tokens = 21
    whole = block_map(memory, [sequence]).blocks
    for first, count in ((0, 5), (5, 5), (10, 5), (12, 5), (3, 0)):
        found = block_map(memory, iter([sequence]), first, count)
        assert found.blocks == whole[first : first + count]
        assert found.first_block == first and found.num_blocks == 12


def test_map_and_report_agree_under_random_operations() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        world = World(rng.randint(6, 40), rng.choice([1, 2, 4]), rng.randint(1, 3), True)
        memory, size = world.memory, world.size
        for _ in range(150):
            act(world, rng)
            uses = block_map(memory, world.live).blocks
            holds = Counter(memory.deferred.blocks())
            for use in uses:
                assert use.ref_count == len(use.owners) + holds[use.block]
                assert (use.ref_count > 0) == (use.state is HELD)
                assert use.owners == () or use.fill is not None
                content = memory.pool.content[use.block]
                assert (use.group is None) == (content is None and not use.owners)
                assert content is None or content[0] == use.group
            report = memory_report(memory, world.live)
            useful = sum(use.fill or 0 for use in uses if use.owners)
            assert report.useful_bytes == useful * 64 // size
            states = Counter(use.state for use in uses)
            assert report.cached_bytes == states[CACHED] * 64
            assert report.free_bytes == states[FREE] * 64
            assert report.reserved_bytes == sum(use.fill == 0 for use in uses if use.owners) * 64
        world.finish()
