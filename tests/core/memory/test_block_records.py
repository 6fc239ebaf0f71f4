"""The compact block map against `block_map`, under random operations and by hand."""

import random

import pytest
from tests.core.harness import make_memory
from tests.core.memory.memory_world import World
from tests.core.memory.test_memory_machine import HYBRIDS, act, read_groups
from tests.core.memory.test_memory_report import admitted

from quire.core.kv_groups import KVKind
from quire.core.memory.block_records import (
    FULL,
    HAS_CONTENT,
    HELD,
    RECORD_BYTES,
    OwnerSlots,
    block_records,
)
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.memory_report import BlockState, block_map
from quire.core.sequence import Sequence

STATES = {0: BlockState.FREE, HAS_CONTENT: BlockState.CACHED}


def check(memory: KVCacheManager, live: list[Sequence]) -> None:
    """Every byte of every record must say what `block_map` says."""
    slots = OwnerSlots().update([sequence.request_id for sequence in live])
    names = {slot: name for name, slot in slots.items()}
    records = block_records(memory, live, slots)
    assert len(records) == RECORD_BYTES * memory.pool.num_blocks
    for use in block_map(memory, live).blocks:
        start = use.block * RECORD_BYTES
        flags, holders, heat, fill, low, high, group = records[start : start + RECORD_BYTES]
        state = BlockState.HELD if flags & HELD else STATES[flags]
        assert state is use.state
        assert (holders, heat) == (min(use.ref_count, 255), min(use.heat, 255))
        assert group == (0 if use.group is None else use.group + 1)
        owners = {name for name, _ in use.owners}
        assert names.get(low + 256 * high) in (owners or {None})
        if use.fill is not None and not len(use.owners) > 1:
            assert fill == pytest.approx(FULL * use.fill / memory.block_size, abs=1)


@pytest.mark.parametrize("seed", range(4))
def test_records_equal_the_block_map_under_random_operations(seed: int) -> None:
    generator = random.Random(seed)
    world = World(generator.randint(6, 40), generator.choice([1, 2, 4]), 1 + seed % 3, seed > 0)
    for _ in range(120):
        act(world, generator)
        check(world.memory, world.live)


@pytest.mark.parametrize("kinds", HYBRIDS)
def test_records_of_windows_and_states_equal_the_block_map(kinds: str) -> None:
    generator = random.Random(kinds)
    world = World(generator.randint(16, 60), 4, read_groups(kinds), True)
    for _ in range(100):
        act(world, generator)
        check(world.memory, world.live)


def test_partly_filled_block_keeps_a_share_of_its_size() -> None:
    memory = make_memory(16)
    sequence = admitted(memory, 10, 6)
    records = block_records(memory, [sequence], {sequence.request_id: 300})
    (table,) = sequence.block_tables
    rows = [records[block * RECORD_BYTES : (block + 1) * RECORD_BYTES] for block in table]
    assert [row[3] for row in rows] == [FULL, FULL // 2, 0]
    assert all(row[4] + 256 * row[5] == 300 for row in rows)
    assert memory.config.groups[0].kind is KVKind.FULL


def test_counts_above_255_are_shown_as_255() -> None:
    memory = make_memory(4)
    memory.pool.ref_count[2] = 1000
    assert block_records(memory, [], {})[2 * RECORD_BYTES + 1] == 255


def test_request_keeps_its_slot_while_it_lives_and_the_slot_is_reused_later() -> None:
    slots = OwnerSlots()
    assert slots.update(["a", "b", "b", "c"]) == {"a": 1, "b": 2, "c": 3}
    assert slots.update(["c", "a"]) == {"a": 1, "c": 3}
    assert slots.update(["d", "a", "c", "e"]) == {"a": 1, "c": 3, "d": 2, "e": 4}
