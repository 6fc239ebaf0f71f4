"""Block tables: what is matched, taken, published and given back, and in which order."""

import random

import pytest
from tests.core.harness import make_memory, make_sequence

from quire.core import invariants
from quire.core.kv_cache_manager import KVCacheManager, append_edits
from quire.core.sequence import Sequence
from quire.core.step import EditKind, TableEdit


def write(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> Sequence:
    """A sequence that was admitted and whose tokens are all computed and published."""
    sequence = make_sequence(memory, token_ids, domain=domain)
    memory.admit(sequence, memory.match(sequence))
    sequence.num_computed_tokens = len(token_ids)
    memory.publish(sequence, len(token_ids))
    return sequence


def num_hits(memory: KVCacheManager, token_ids: list[int], domain: str = "") -> int:
    return memory.match(make_sequence(memory, token_ids, domain=domain)).num_tokens


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)]
)
def test_blocks_for(num_groups: int, num_tokens: int, num_blocks: int) -> None:
    assert make_memory(num_groups=num_groups).blocks_for(num_tokens) == num_blocks * num_groups


@pytest.mark.parametrize(
    ("cached", "asked", "expected"),
    [
        (8, 8, 4),  # the last token is always computed, so its block is not matched
        (8, 9, 8),
        (8, 12, 8),
        (7, 12, 4),  # only full blocks are known
        (3, 12, 0),
        (8, 4, 0),
        (8, 5, 4),
        (8, 1, 0),
    ],
)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_match_is_whole_blocks_and_leaves_a_token(
    cached: int, asked: int, expected: int, num_groups: int
) -> None:
    memory = make_memory(num_groups=num_groups)
    write(memory, list(range(cached)))
    match = memory.match(make_sequence(memory, list(range(asked))))
    assert match.num_tokens == expected
    assert [len(ids) for ids in match.blocks] == [expected // 4] * num_groups


def test_a_match_ends_at_the_first_different_token() -> None:
    memory = make_memory()
    write(memory, list(range(12)))
    assert num_hits(memory, [0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11, 12]) == 4


def test_a_match_changes_no_memory() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(12)))
    memory.free(sequence)
    before = (memory.pool.free_ids(), list(memory.pool.ref_count), len(memory.cache))
    match = memory.match(make_sequence(memory, list(range(12))))
    assert match.num_revived == 2
    assert (memory.pool.free_ids(), memory.pool.ref_count, len(memory.cache)) == before


def test_matched_blocks_are_shared_and_new_ones_are_not() -> None:
    memory = make_memory()
    first = write(memory, list(range(10)))
    second = write(memory, [*range(8), 50, 51])
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert second.block_tables[0][2] != first.block_tables[0][2]
    assert [memory.pool.ref_count[block] for block in second.block_tables[0]] == [2, 2, 1]
    assert (second.num_cached_tokens, memory.num_hit_tokens, memory.num_query_tokens) == (8, 8, 20)
    invariants.check_memory(memory, [first, second])


def test_domains_never_hit_one_another() -> None:
    memory = make_memory()
    write(memory, list(range(12)), "tenant-a")
    assert num_hits(memory, list(range(12)), "tenant-b") == 0
    assert num_hits(memory, list(range(12)), "") == 0
    assert num_hits(memory, list(range(12)), "tenant-a") == 8


def test_nothing_is_found_before_it_was_written() -> None:
    memory = make_memory()
    sequence = make_sequence(memory, list(range(12)))
    memory.admit(sequence, memory.match(sequence))
    assert num_hits(memory, list(range(12))) == 0
    memory.publish(sequence, 7)
    assert num_hits(memory, list(range(12))) == 4


def test_a_disabled_cache_finds_nothing_and_counts_nothing() -> None:
    memory = make_memory(caching=False)
    write(memory, list(range(12)))
    assert num_hits(memory, list(range(12))) == 0
    assert (len(memory.cache), memory.num_query_tokens) == (0, 0)


def test_prompt_logprobs_are_computed_not_read_from_the_cache() -> None:
    memory = make_memory()
    write(memory, list(range(12)))
    assert memory.match(make_sequence(memory, range(12), prompt_logprobs=1)).num_tokens == 0


def test_a_second_writer_of_the_same_content_stays_private() -> None:
    memory = make_memory()
    one, two = (make_sequence(memory, list(range(8))) for _ in range(2))
    for sequence in (one, two):
        memory.admit(sequence, memory.match(sequence))
    memory.publish(one, 8)
    memory.publish(two, 8)
    assert not set(one.block_tables[0]) & set(two.block_tables[0])
    assert list(memory.cache.entries(0).values()) == one.block_tables[0]
    memory.free(one)
    memory.free(two)
    # The private blocks have no content and are taken first; the known ones outlive them.
    assert memory.pool.free_ids()[:2] == [2, 3] and memory.pool.free_ids()[-2:] == [1, 0]
    invariants.check_memory(memory, [])


def test_tails_are_evicted_before_heads() -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(16))))
    found = [num_hits(memory, list(range(17)))]
    for _ in range(4):
        evictor = make_sequence(memory, [900 + len(found)])
        memory.admit(evictor, memory.match(evictor))
        found.append(num_hits(memory, list(range(17))))
    assert found == [16, 12, 8, 4, 0]
    assert memory.num_evicted_blocks == 4


def test_the_least_recently_released_is_evicted_first() -> None:
    memory = make_memory(num_blocks=3)
    writers = [write(memory, [number] * 4) for number in (1, 2, 3)]
    for index in (1, 0, 2):
        memory.free(writers[index])
    memory.free(write(memory, [2] * 4 + [9]))  # used again: now the youngest, and 1 is the oldest
    assert [num_hits(memory, [number] * 5) for number in (1, 2, 3)] == [0, 4, 4]


@pytest.mark.parametrize("num_groups", [2, 3])
def test_a_block_that_one_group_lost_is_no_hit_in_any(num_groups: int) -> None:
    memory = make_memory(num_blocks=2 * num_groups, num_groups=num_groups)
    memory.free(write(memory, list(range(8))))
    _, evicted = memory.pool.take(1)
    for key in evicted:
        memory.cache.remove(*key)
    assert [len(memory.cache.entries(group)) for group in range(num_groups)].count(1) == 1
    assert num_hits(memory, list(range(9))) == 4


def test_growing_takes_blocks_in_all_groups_or_in_none() -> None:
    memory = make_memory(num_blocks=5, num_groups=2)
    sequence = write(memory, list(range(4)))
    assert memory.grow(sequence, 4) == []
    assert memory.grow(sequence, 5) == [(0, 1, [2]), (1, 1, [3])]
    assert memory.grow(sequence, 9) is None
    assert (sequence.num_slots, memory.pool.num_free) == (8, 1)
    assert sequence.block_tables == ([0, 2], [1, 3])
    invariants.check_memory(memory, [sequence])


def test_growing_by_several_blocks_at_once() -> None:
    memory = make_memory()
    sequence = write(memory, [1])
    assert memory.grow(sequence, 13) == [(0, 1, [1, 2, 3])]
    assert sequence.num_slots == 16


def test_edits_say_what_growing_did() -> None:
    assert append_edits(3, [(0, 1, [7, 8]), (1, 1, [9, 5])]) == [
        TableEdit(3, 0, EditKind.APPEND, 1, (7, 8)),
        TableEdit(3, 1, EditKind.APPEND, 1, (9, 5)),
    ]


@pytest.mark.parametrize(("num_spare", "fits"), [(0, True), (1, True), (2, False)])
def test_admission_counts_revived_and_spare_blocks(num_spare: int, fits: bool) -> None:
    memory = make_memory(num_blocks=4)
    memory.free(write(memory, list(range(8))))
    sequence = make_sequence(memory, list(range(9)))
    match = memory.match(sequence)
    assert (match.num_tokens, match.num_revived) == (8, 2)
    assert memory.can_admit(sequence, match, num_spare) is fits


def test_held_blocks_that_are_shared_cost_nothing_free() -> None:
    memory = make_memory(num_blocks=3)
    write(memory, list(range(8)))
    sequence = make_sequence(memory, list(range(9)))
    assert memory.can_admit(sequence, memory.match(sequence), 0)


def test_a_step_holds_the_blocks_of_a_freed_sequence() -> None:
    memory = make_memory(num_blocks=4)
    one, two = write(memory, [1] * 8), write(memory, [2] * 8)
    memory.free(one, after_step_id=5)
    memory.free(two, after_step_id=4)
    assert (memory.num_blocks_held_by_steps, memory.pool.num_free) == (4, 0)
    invariants.check_memory(memory, [])
    memory.end_step(3)
    assert memory.pool.num_free == 0
    memory.end_step(4)
    assert sorted(memory.blocks_held_by_steps()) == [0, 1]
    assert memory.pool.num_free == 2
    memory.end_step(5)
    assert (memory.num_blocks_held_by_steps, memory.pool.num_free) == (0, 4)
    invariants.check_memory(memory, [])


def test_a_freed_sequence_has_nothing() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(9)))
    memory.free(sequence)
    assert (sequence.block_tables, sequence.num_slots, sequence.num_computed_tokens) == ((), 0, 0)
    assert sequence.num_published_blocks == 0
    assert memory.pool.num_held == 0


def test_a_cleared_cache_is_empty_and_its_blocks_stay_with_their_holders() -> None:
    memory = make_memory(num_blocks=6)
    held = write(memory, list(range(8)))
    memory.free(write(memory, [9] * 8))
    memory.clear_cache()
    assert len(memory.cache) == 0
    assert num_hits(memory, list(range(9))) == num_hits(memory, [9] * 9) == 0
    invariants.check_memory(memory, [held])
    memory.publish(held, 8)
    memory.free(held)
    invariants.check_memory(memory, [])


def test_only_the_first_admission_counts_as_query() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(12)))
    memory.free(sequence)
    memory.admit(sequence, memory.match(sequence))
    assert (sequence.num_cached_tokens, sequence.num_computed_tokens) == (0, 8)
    assert (memory.num_query_tokens, memory.num_hit_tokens) == (12, 0)
    assert sequence.num_admissions == 2


def test_generated_tokens_are_found_too() -> None:
    memory = make_memory()
    sequence = write(memory, list(range(6)))
    for token_id in range(6, 13):
        sequence.append(token_id)
        memory.grow(sequence, len(sequence.token_ids))
    memory.publish(sequence, 12)
    assert num_hits(memory, list(range(20))) == 12


def test_many_random_prompts_hit_exactly_what_their_past_says() -> None:
    rng = random.Random(1)
    memory = make_memory(num_blocks=400, block_size=2)
    past: set[tuple[int, ...]] = set()
    for _ in range(80):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
        blocks = (len(tokens) - 1) // 2
        expected = 0
        while expected < blocks and tuple(tokens[: 2 * expected + 2]) in past:
            expected += 1
        assert num_hits(memory, tokens) == 2 * expected
        memory.free(write(memory, tokens))
        past |= {tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)}
    invariants.check_memory(memory, [])
