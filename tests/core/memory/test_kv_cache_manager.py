"""Block tables: what is taken, shared, copied and given back, and in which order."""

import random

import pytest
from tests.core.harness import make_groups, make_memory, make_sequence

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling import invariants
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, EditKind, TableEdit

STEP = 7  # any step


def admit(memory: KVCacheManager, sequence: Sequence) -> list[BlockCopy]:
    return memory.admit(sequence, memory.match(sequence), STEP)


def compute(memory: KVCacheManager, sequence: Sequence) -> None:
    """All its tokens are computed, and the step has ended."""
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = len(sequence.token_ids)
    memory.publish(sequence, len(sequence.token_ids))


def write(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> Sequence:
    """A sequence that was admitted and whose tokens are all computed and published."""
    sequence = make_sequence(memory, token_ids, domain=domain)
    admit(memory, sequence)
    compute(memory, sequence)
    memory.end_step(STEP)
    return sequence


def fork(memory: KVCacheManager, parent: Sequence, index: int = 1) -> Sequence:
    """A child that shares all that its parent has computed."""
    child = parent.branch(index, parent.params)
    memory.fork(child, parent)
    return child


def num_hits(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> int:
    return memory.match(make_sequence(memory, token_ids, domain=domain)).num_tokens


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)]
)
def test_blocks_for(num_groups: int, num_tokens: int, num_blocks: int) -> None:
    assert make_memory(num_groups=num_groups).blocks_for(num_tokens) == num_blocks * num_groups


def test_a_freed_sequence_has_nothing() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(9)))
    memory.free(sequence)
    assert (sequence.block_tables, sequence.num_slots, sequence.num_computed_tokens) == ((), 0, 0)
    assert sequence.num_published_blocks == 0
    assert memory.pool.num_held == 0


# ---- admission ----------------------------------------------------------------------------------


def test_matched_blocks_are_shared_and_new_ones_are_not() -> None:
    memory = make_memory()
    first = write(memory, list(range(10)))
    second = write(memory, [*range(8), 50, 51])
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert second.block_tables[0][2] != first.block_tables[0][2]
    assert [memory.pool.ref_count[block] for block in second.block_tables[0]] == [2, 2, 1]
    assert second.num_cached_tokens == 8
    invariants.check_memory(memory, [first, second])


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(
    ("prompt", "num_needed"),
    [
        (list(range(9)), 3),  # two revived blocks, one new
        (list(range(8)), 3),  # one revived, one revived to be copied, one new for the copy
        ([*range(6), 90, 91, 92], 4),  # the same, and one new
        ([90] * 9, 3),
        ([0], 1),
    ],
)
def test_admission_takes_as_many_free_blocks_as_predicted(
    prompt: list[int], num_needed: int, num_groups: int
) -> None:
    memory = make_memory(num_groups=num_groups)
    memory.free(write(memory, list(range(8))))
    sequence = make_sequence(memory, prompt)
    match = memory.match(sequence)
    assert memory.num_blocks_to_admit(sequence, match) == num_needed * num_groups
    before = memory.pool.num_free
    memory.admit(sequence, match, STEP)
    assert before - memory.pool.num_free == num_needed * num_groups
    invariants.check_memory(memory, [sequence])


def test_held_blocks_that_are_shared_cost_nothing_free() -> None:
    memory = make_memory(num_blocks=3)
    write(memory, list(range(8)))
    sequence = make_sequence(memory, list(range(9)))
    assert memory.num_blocks_to_admit(sequence, memory.match(sequence)) == 1


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_block_that_agrees_in_part_is_copied_and_its_source_held_for_the_step(
    num_groups: int, is_held: bool
) -> None:
    memory = make_memory(num_groups=num_groups)
    other = write(memory, list(range(8)))
    theirs = [list(table) for table in other.block_tables]
    if not is_held:
        memory.free(other)
    sequence = make_sequence(memory, [*range(6), 90, 91, 92])
    copies = admit(memory, sequence)
    mine = sequence.block_tables
    assert copies == [BlockCopy(theirs[group][1], mine[group][1]) for group in range(num_groups)]
    assert [table[0] for table in mine] == [table[0] for table in theirs]
    assert (sequence.num_computed_tokens, sequence.num_confirmed_tokens) == (6, 4)
    assert sorted(memory.deferred.blocks()) == sorted(table[1] for table in theirs)
    live = [sequence, other] if is_held else [sequence]
    invariants.check_memory(memory, live)
    memory.end_step(STEP - 1)
    assert memory.deferred.num_blocks == num_groups
    memory.end_step(STEP)
    assert memory.deferred.num_blocks == 0
    invariants.check_memory(memory, live)


def test_a_copy_that_was_not_made_is_not_published() -> None:
    """Its sequence ends while the step is in flight; if the step fails, nothing is in the block."""
    memory = make_memory()
    write(memory, list(range(8)))
    sequence = make_sequence(memory, [*range(7), 90])
    copies = memory.admit(sequence, memory.match(sequence), STEP + 1)
    sequence.last_step_id = STEP + 1
    memory.free(sequence)
    assert memory.pool.content[copies[0].target] is None
    memory.end_step(STEP + 1)
    assert num_hits(memory, [*range(7), 91]) == 7, "from the one that has it"


def test_only_what_is_written_counts_as_published_of_what_a_running_parent_gives() -> None:
    """A step in flight writes the rest; if it fails, the child keeps only the written part."""
    memory = make_memory(caching=False)
    parent = write(memory, list(range(6)))
    for token_id in range(6, 12):
        parent.append(token_id)
    memory.grow(parent, 12)
    parent.num_computed_tokens = 11
    child = parent.branch(1, parent.params)
    child.fork_from(parent)
    match = memory.match(child)
    memory.admit(child, match, STEP)
    assert (match.num_tokens, child.num_computed_tokens) == (11, 11)
    assert child.block_tables[0][:2] == parent.block_tables[0][:2]
    assert (child.num_confirmed_tokens, child.num_published_blocks) == (6, 1)


# ---- growing ------------------------------------------------------------------------------------


def test_growing_takes_blocks_in_all_groups_or_in_none() -> None:
    memory = make_memory(num_blocks=5, num_groups=2)
    sequence = write(memory, list(range(4)))
    assert memory.grow(sequence, 4) == []
    append = EditKind.APPEND
    sequence.row = 3
    assert memory.grow(sequence, 5) == [
        TableEdit(3, 0, append, 1, (2,)),
        TableEdit(3, 1, append, 1, (3,)),
    ]
    assert memory.grow(sequence, 9) is None
    assert (sequence.num_slots, memory.pool.num_free) == (8, 1)
    assert sequence.block_tables == ([0, 2], [1, 3])
    invariants.check_memory(memory, [sequence])


@pytest.mark.parametrize(
    ("num_tokens", "num_extra", "num_slots"),
    [(13, 0, 16), (5, 2, 16), (4, 2, 4), (5, 15, None), (5, 14, 64)],
)
def test_growing_by_several_blocks_is_one_operation(
    num_tokens: int, num_extra: int, num_slots: int | None
) -> None:
    memory = make_memory(num_blocks=16)
    sequence = write(memory, [1])
    edits = memory.grow(sequence, num_tokens, num_extra)
    assert edits is None if num_slots is None else edits is not None and len(edits) <= 1
    assert sequence.num_slots == (num_slots or 4)
    assert memory.pool.num_held == sequence.num_slots // 4


# ---- forks and copies on write ------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("num_branches", [1, 2, 4, 6])
def test_branches_share_all_blocks_and_copy_the_last_one_once_each(
    num_branches: int, num_tokens: int, num_groups: int
) -> None:
    """Of n holders of a partly filled block n - 1 copy it; the last one writes in place."""
    memory = make_memory(num_blocks=40, num_groups=num_groups)
    parent = write(memory, list(range(num_tokens)))
    num_held = memory.pool.num_held
    branches = [parent, *(fork(memory, parent, index) for index in range(1, num_branches))]
    assert memory.pool.num_held == num_held, "a fork takes no block"
    assert all(branch.block_tables == parent.block_tables for branch in branches)
    shared = [list(table) for table in parent.block_tables]
    copies: list[BlockCopy] = []
    for sequence in branches:
        if memory.copy_on_write.is_due(sequence):
            copies += memory.copy_on_write.copy(sequence, STEP)[1]
        assert not memory.copy_on_write.is_due(sequence), "its own now"
        assert memory.grow(sequence, num_tokens + 1) is not None
    is_partial = num_tokens % 4 != 0
    assert len(copies) == (num_branches - 1) * num_groups * is_partial
    assert {copy.source for copy in copies} <= {table[-1] for table in shared}
    index = num_tokens // 4
    written = [table[index] for branch in branches for table in branch.block_tables]
    assert len(set(written)) == len(written), "each writes a block of its own"
    invariants.check_memory(memory, branches)
    memory.end_step(STEP)
    invariants.check_memory(memory, branches)
    assert not memory.deferred.num_copied_from


def test_a_copied_block_replaces_the_shared_one_in_the_row() -> None:
    memory = make_memory(num_groups=2)
    parent = write(memory, list(range(6)))
    child = fork(memory, parent)
    parent.row = 5
    before = [table[1] for table in parent.block_tables]
    edits, copies = memory.copy_on_write.copy(parent, STEP)
    after = [table[1] for table in parent.block_tables]
    assert edits == [
        TableEdit(5, group, EditKind.REPLACE, 1, (after[group],)) for group in range(2)
    ]
    assert copies == [BlockCopy(*pair) for pair in zip(before, after, strict=True)]
    assert [table[1] for table in child.block_tables] == before


def test_the_last_holder_writes_in_place_while_the_copy_is_still_to_come() -> None:
    """A step copies before it computes, so a source may be written on in the same step."""
    memory = make_memory()
    parent = write(memory, list(range(6)))
    child = fork(memory, parent)
    assert memory.copy_on_write.is_due(child) and memory.copy_on_write.is_due(parent)
    memory.copy_on_write.copy(parent, STEP)
    assert memory.pool.ref_count[child.block_tables[0][1]] == 2, "the step holds it, too"
    assert not memory.copy_on_write.is_due(child)
    grandchild = fork(memory, child, 2)
    assert memory.copy_on_write.is_due(child) and memory.copy_on_write.is_due(grandchild)


def test_a_fork_is_without_the_blocks_that_its_parent_has_reserved() -> None:
    memory = make_memory()
    parent = write(memory, list(range(6)))
    memory.grow(parent, 9, 2)
    child = fork(memory, parent)
    assert (parent.num_slots, child.num_slots) == (20, 8)
    invariants.check_memory(memory, [parent, child])


def test_forking_takes_over_counts_and_hashes() -> None:
    memory = make_memory()
    parent = write(memory, list(range(10)))
    parent.public_chain.append(b"x")
    child = fork(memory, parent)
    assert (child.num_computed_tokens, child.num_confirmed_tokens) == (10, 10)
    assert child.num_published_blocks == 2
    assert child.chain == parent.chain and child.chain is not parent.chain
    assert child.public_chain == [b"x"] and child.public_chain is not parent.public_chain


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_dead_beam_swaps_references_from_where_it_parted(num_groups: int) -> None:
    memory = make_memory(num_blocks=30, num_groups=num_groups)
    parent = write(memory, list(range(6)))
    dead = fork(memory, parent)
    for sequence, token_id in ((parent, 50), (dead, 60)):
        if memory.copy_on_write.is_due(sequence):
            memory.copy_on_write.copy(sequence, STEP)
        for _ in range(3):
            sequence.append(token_id)
        memory.grow(sequence, 9)
        compute(memory, sequence)
    memory.end_step(STEP)
    kept = [table[0] for table in dead.block_tables]
    memory.fork(dead, parent)
    assert dead.block_tables == parent.block_tables
    assert [table[0] for table in dead.block_tables] == kept
    assert [memory.pool.ref_count[block] for block in parent.block_tables[0]] == [2, 2, 2]
    assert (dead.num_computed_tokens, dead.num_slots) == (9, 12)
    assert dead.chain == parent.chain
    assert memory.copy_on_write.is_due(dead)
    invariants.check_memory(memory, [parent, dead])


@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_dead_beam_that_had_lost_blocks_gets_them_all(num_kept: int) -> None:
    memory = make_memory(num_blocks=30)
    parent = write(memory, list(range(6)))
    dead = fork(memory, parent)
    memory.truncate(dead, num_kept)
    memory.fork(dead, parent)
    assert dead.block_tables == parent.block_tables
    invariants.check_memory(memory, [parent, dead])


# ---- giving back --------------------------------------------------------------------------------


def test_tails_are_evicted_before_heads() -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(16))))
    found = [num_hits(memory, list(range(17)))]
    for number in range(4):
        admit(memory, make_sequence(memory, [900 + number]))
        found.append(num_hits(memory, list(range(17))))
    assert found == [16, 12, 8, 4, 0]
    assert memory.num_evicted_blocks == 4


def test_the_order_of_eviction_is_a_choice() -> None:
    config = KVCacheConfig(make_groups(1), 3, 4, True, b"secret", eviction="lru")
    memory = KVCacheManager(config)
    writers = [write(memory, [number] * 4) for number in (1, 2, 3)]
    for index in (1, 0, 2):
        memory.free(writers[index])
    memory.free(write(memory, [2] * 4 + [9]))  # used again: now the youngest, and 1 is the oldest
    assert [num_hits(memory, [number] * 5) for number in (1, 2, 3)] == [0, 4, 4]


@pytest.mark.parametrize(
    ("num_kept", "computed", "written", "published"),
    [(3, 10, 9, 2), (2, 8, 8, 2), (1, 4, 4, 1), (0, 0, 0, 0)],
)
def test_a_cut_takes_the_tail_and_counts_no_more_than_is_left(
    num_kept: int, computed: int, written: int, published: int
) -> None:
    memory = make_memory()
    sequence = write(memory, list(range(10)))
    sequence.num_confirmed_tokens = 9
    assert memory.truncate(sequence, num_kept) == 3 - num_kept
    assert [len(table) for table in sequence.block_tables] == [num_kept]
    assert (sequence.num_computed_tokens, sequence.num_confirmed_tokens) == (computed, written)
    assert sequence.num_published_blocks == published
    invariants.check_memory(memory, [sequence])


def test_a_cut_says_what_becomes_free_not_what_was_cut() -> None:
    memory = make_memory()
    parent = write(memory, list(range(12)))
    child = fork(memory, parent)
    memory.grow(child, 13)
    assert memory.truncate(child, 1) == 1
    assert memory.truncate(parent, 2) == 1
    assert memory.truncate(parent, 2) == 0, "nothing is beyond that"


@pytest.mark.parametrize(("num_wanted", "num_kept"), [(0, 4), (1, 3), (2, 2), (3, 0), (9, 0)])
def test_truncation_takes_only_as_many_blocks_as_needed(num_wanted: int, num_kept: int) -> None:
    """Blocks 0 and 1 have other holders: cutting them frees nothing."""
    memory = make_memory()
    sequence = write(memory, list(range(16)))
    write(memory, list(range(9)))
    assert memory.num_kept_blocks(sequence, num_wanted) == num_kept


def test_a_cut_in_flight_is_held_and_counts_as_free_soon() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(16)))
    sequence.last_step_id = STEP + 1
    assert memory.truncate(sequence, 1) == 3
    assert (memory.pool.num_free, memory.num_free_soon) == (12, 15)
    invariants.check_memory(memory, [sequence])
    memory.end_step(STEP + 1)
    assert (memory.pool.num_free, memory.num_free_soon) == (15, 15)


def test_blocks_that_no_step_still_reads_are_freed_at_once() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(16)))
    sequence.last_step_id = STEP
    assert memory.truncate(sequence, 1) == 3
    assert (memory.pool.num_free, memory.num_free_soon) == (15, 15)


def test_failed_steps_and_the_copies_planned_after_them_hold_nothing() -> None:
    memory = make_memory()
    ended = write(memory, list(range(8)))
    ended.last_step_id = STEP + 1
    memory.free(ended)
    copying = make_sequence(memory, [*range(7), 90])
    memory.admit(copying, memory.match(copying), STEP + 2)
    assert memory.deferred.num_blocks == 3
    memory.end_step(STEP + 1, has_failed=True)
    assert memory.deferred.num_blocks == 0
    invariants.check_memory(memory, [copying])


def test_the_step_after_failed_ones_holds_what_it_reads() -> None:
    """It has the id of the step that was given up with them."""
    memory = make_memory()
    sequence = write(memory, list(range(8)))
    memory.end_step(STEP + 1, has_failed=True)
    sequence.last_step_id = STEP + 2
    memory.free(sequence)
    assert memory.deferred.num_blocks == 2
    memory.end_step(STEP + 2)
    assert memory.deferred.num_blocks == 0


def test_a_kept_shared_tail_is_copied_when_its_sequence_comes_back() -> None:
    memory = make_memory(num_groups=2)
    parent = write(memory, list(range(6)))
    child = fork(memory, parent)
    child.append(9)
    match = memory.match(child)
    assert match == PrefixMatch(6, 6, ((), ()))
    assert memory.num_blocks_to_admit(child, match) == 2
    copies = memory.admit(child, match, STEP)
    assert [copy.source for copy in copies] == [table[1] for table in parent.block_tables]
    assert child.num_slots == 8
    invariants.check_memory(memory, [parent, child])


def test_random_forks_and_writes_copy_each_shared_block_but_for_its_last_holder() -> None:
    rng = random.Random(4)
    memory = make_memory(num_blocks=300, block_size=8)
    live = [write(memory, list(range(3)))]
    num_copies = 0
    for step in range(200):
        sequence = rng.choice(live)
        if rng.random() < 0.3 and len(live) < 12:
            live.append(fork(memory, sequence, step))
        elif rng.random() < 0.2 and len(live) > 1:
            live.remove(sequence)
            memory.free(sequence)
        else:
            if memory.copy_on_write.is_due(sequence):
                num_copies += len(memory.copy_on_write.copy(sequence, step)[1])
            sequence.append(step)
            assert memory.grow(sequence, len(sequence.token_ids)) is not None
            compute(memory, sequence)
        memory.end_step(step)
        invariants.check_memory(memory, live)
    assert num_copies > 10
