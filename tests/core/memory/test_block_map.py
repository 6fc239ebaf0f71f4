"""What is reported of each block: by hand, and as the ledger's other view under random operations."""

import random
from collections import Counter

from tests.core.harness import make_memory, make_sequence
from tests.core.memory.memory_world import World
from tests.core.memory.test_memory_machine import act

from quire.core.memory.memory_report import BlockState, BlockUse, block_map, memory_report

HELD, CACHED, FREE = BlockState.HELD, BlockState.CACHED, BlockState.FREE


def test_each_block_of_two_groups_with_two_branches() -> None:
    memory = make_memory(8, num_groups=2)
    parent = make_sequence(memory, range(1, 7), name="a")
    memory.admit(parent, memory.match(parent), step_id=0)
    parent.num_computed_tokens = parent.num_written_tokens = 6
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
        assert uses[full] == BlockUse(full, HELD, group, 2, both, 0, 4)
        assert uses[partial] == BlockUse(partial, HELD, group, 2, both, 0, 2)
        assert uses[empty] == BlockUse(empty, HELD, group, 1, (("a", 0),), 0, 0)
    rest = set(range(8)) - {block for table in parent.block_tables for block in table}
    for block in rest:
        assert uses[block] == BlockUse(block, FREE, None, 0, (), 0, None)


def test_a_hit_makes_a_block_hotter_and_its_content_outlives_its_owner() -> None:
    memory = make_memory(8)
    for _ in range(3):
        sequence = make_sequence(memory, range(1, 10), name="s")
        memory.admit(sequence, memory.match(sequence), step_id=0)
        sequence.num_computed_tokens = sequence.num_written_tokens = 9
        memory.publish(sequence, 9)
        first, second, _ = sequence.block_tables[0]
        memory.free(sequence)
    uses = block_map(memory, []).blocks
    assert [uses[block].heat for block in (first, second)] == [2, 2]
    for block in (first, second):
        assert (uses[block].state, uses[block].group, uses[block].owners) == (CACHED, 0, ())
        assert uses[block].ref_count == 0 and uses[block].fill == 4


def test_what_only_a_step_holds_has_no_owner() -> None:
    memory = make_memory(4, caching=False)
    sequence = make_sequence(memory, range(1, 6))
    memory.admit(sequence, memory.match(sequence), step_id=0)
    blocks = set(sequence.block_tables[0])
    memory.free(sequence, after_step_id=0)
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
