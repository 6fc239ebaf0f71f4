"""The baselines' manager: what it reserves, where, and that it gives back what it took."""

from dataclasses import replace

import pytest

from quire.bench.baselines.contiguous import (
    KV_ALLOCATORS,
    RESERVATIONS,
    ContiguousKVCacheManager,
    contiguous,
    find_allocator,
)
from quire.bench.baselines.run_allocators import PLACEMENTS
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.memory_report import memory_report
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence
from quire.errors import ConfigurationError

MAX_MODEL_LEN = 64
BLOCK = 64  # bytes of one


def make_memory(
    reservation: str = "oracle",
    *,
    num_blocks: int = 64,
    num_groups: int = 1,
    placement: str = "first_fit",
) -> ContiguousKVCacheManager:
    groups = tuple(KVGroup((index,), KVKind.FULL, 64) for index in range(num_groups))
    config = KVCacheConfig(groups, num_blocks, block_size=4, enable_prefix_caching=False)
    return ContiguousKVCacheManager(config, reservation, MAX_MODEL_LEN, placement)


def make_sequence(num_prompt_tokens: int, num_output_tokens: int) -> Sequence:
    params = DecodingParams(num_output_tokens)
    return Sequence("s", [7] * num_prompt_tokens, params, max_num_tokens=MAX_MODEL_LEN)


def admitted(memory: ContiguousKVCacheManager, num_prompt: int, num_output: int) -> Sequence:
    sequence = make_sequence(num_prompt, num_output)
    assert memory.admit(sequence, memory.match(sequence), step_id=0) == []
    return sequence


def num_run_blocks(memory: ContiguousKVCacheManager, sequence: Sequence) -> int:
    """Blocks reserved for a sequence, with those that the placement added."""
    return len(memory._runs.get(sequence, ()))


@pytest.mark.parametrize(
    ("reservation", "num_prompt", "num_output", "num_slots"),
    [
        ("max", 5, 3, 64),
        ("max", 40, 20, 64),
        ("pow2", 5, 25, 5 + 32),  # the paper's own example: 32 for an output of 25
        ("pow2", 5, 16, 5 + 16),
        ("pow2", 5, 1, 5 + 1),
        ("pow2", 30, 34, 64),  # never beyond max_model_len
        ("oracle", 5, 25, 30),
        ("oracle", 30, 200, 64),  # max_model_len ends it
    ],
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_each_reservation_reserves_its_number_of_blocks(
    reservation: str, num_prompt: int, num_output: int, num_slots: int, num_groups: int
) -> None:
    memory = make_memory(reservation, num_groups=num_groups)
    sequence = admitted(memory, num_prompt, num_output)
    num_blocks = -(-num_slots // 4)
    assert sequence.num_slots == num_blocks * 4
    assert [len(table) for table in sequence.block_tables] == [num_blocks] * num_groups
    assert num_run_blocks(memory, sequence) == num_blocks * num_groups == memory.pool.num_held
    assert memory.grow(sequence, sequence.max_num_tokens, 3) == []


@pytest.mark.parametrize("num_groups", [1, 3])
def test_tables_are_adjacent_blocks(num_groups: int) -> None:
    memory = make_memory(num_groups=num_groups)
    admitted(memory, 3, 2)
    sequence = admitted(memory, 9, 8)
    ids = [block for table in sequence.block_tables for block in table]
    assert ids == list(range(2 * num_groups, 7 * num_groups))


def test_blocks_added_by_buddy_rounding_are_reserved_but_in_no_table() -> None:
    memory = make_memory(placement="buddy")
    sequence = make_sequence(9, 8)  # 5 blocks
    assert memory.num_blocks_to_admit(sequence, memory.match(sequence)) == 8
    memory.admit(sequence, memory.match(sequence), step_id=0)
    assert sequence.block_tables == ([0, 1, 2, 3, 4],)
    assert num_run_blocks(memory, sequence) == 8
    assert (memory.pool.num_free, memory._line.num_free) == (59, 56)


def test_no_hole_is_told_from_too_few_blocks() -> None:
    memory = make_memory(num_blocks=16)
    held = [admitted(memory, 8, 8) for _ in range(4)]
    memory.free(held[0])
    memory.free(held[2])
    big, small = make_sequence(12, 8), make_sequence(8, 4)  # 5 and 3 blocks; two holes of 4
    assert memory.is_fragmented_for(big) and not memory.is_fragmented_for(small)
    assert memory.num_blocks_to_admit(big, memory.match(big)) == memory.pool.num_free + 1 == 9
    assert memory.num_blocks_to_admit(small, memory.match(small)) == 3
    huge = make_sequence(30, 10)  # 10 blocks: too few are free in all
    assert not memory.is_fragmented_for(huge)
    assert memory.num_blocks_to_admit(huge, memory.match(huge)) == 10
    memory.free(held[1])
    assert not memory.is_fragmented_for(big)
    assert memory.num_blocks_to_admit(big, memory.match(big)) == 5


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_all_comes_back(placement: str, reservation: str) -> None:
    memory = make_memory(reservation, placement=placement)
    held = [admitted(memory, prompt, 7) for prompt in (3, 9, 5, 1)]
    for sequence in held:
        memory.free(sequence)
        assert sequence.block_tables == () and sequence.num_slots == 0
        assert num_run_blocks(memory, sequence) == 0
    assert memory.pool.num_held == 0 and memory._line.num_free == 64
    assert admitted(memory, 3, 2).block_tables[0][0] == 0


def test_a_run_that_a_step_may_read_comes_back_with_it() -> None:
    memory = make_memory(num_blocks=16)
    sequence = admitted(memory, 30, 34)
    sequence.last_step_id = 5
    memory.free(sequence)
    assert memory.pool.num_free == memory._line.num_free == 0
    assert sorted(memory.deferred.blocks()) == list(range(16))
    memory.end_step(4)
    assert memory.pool.num_free == memory._line.num_free == 0
    memory.end_step(5)
    assert memory.pool.num_free == memory._line.num_free == 16


def test_a_cut_takes_the_whole_run_or_nothing() -> None:
    memory = make_memory()
    sequence = admitted(memory, 10, 10)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = 11
    assert memory.num_kept_blocks(sequence, 1) == 0
    assert memory.truncate(sequence, 5) == 0
    assert sequence.num_computed_tokens == 11 and num_run_blocks(memory, sequence) == 5
    assert memory.truncate(sequence, 3) == 5
    assert sequence.num_computed_tokens == sequence.num_slots == 0
    assert memory.truncate(sequence, 0) == 0
    assert memory.pool.num_held == 0 and memory._line.num_free == 64
    memory.admit(sequence, memory.match(sequence), step_id=1)
    assert sequence.block_tables == ([0, 1, 2, 3, 4],)


def test_nothing_is_cached() -> None:
    memory = make_memory()
    sequence = admitted(memory, 20, 4)
    sequence.num_computed_tokens = sequence.num_confirmed_tokens = 20
    memory.publish(sequence, 20)
    memory.free(sequence)
    assert len(memory.cache) == 0
    assert memory.match(make_sequence(20, 4)).num_tokens == 0


def test_outgrowing_the_reservation_is_a_bug() -> None:
    memory = make_memory()
    sequence = admitted(memory, 5, 3)
    with pytest.raises(AssertionError, match="outgrows its reservation"):
        memory.grow(sequence, 9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reservation": "all"}, "reservation is 'all', but must be one of max, oracle, pow2"),
        ({"placement": "worst"}, "placement is 'worst'"),
        ({"num_blocks": 15}, "needs 16 adjacent KV blocks, but first_fit .* at most 15"),
        ({"num_blocks": 31, "num_groups": 2}, "needs 32 adjacent KV blocks"),
        ({"num_blocks": 15, "placement": "buddy"}, "has runs of at most 8"),
    ],
)
def test_options_under_which_requests_could_wait_for_ever_are_refused(options, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make_memory(**options)


def test_a_contiguous_run_is_reserved_with_what_it_was_rounded_up_by() -> None:
    """5 + 25 tokens are 8 blocks of 4; 33 of them 9, for which buddies give 16."""
    memory = make_memory(placement="buddy")
    sequence = make_sequence(9, 24)
    memory.admit(sequence, memory.match(sequence), step_id=0)
    sequence.num_computed_tokens = 9
    sequence.tenant = "t"
    report = memory_report(memory, [sequence])
    assert tuple(report.parts.values()) == (9 * 16, 3 * 16, 0, 13 * BLOCK, 0, 0, 0, 48 * BLOCK)
    assert report.lookahead_bytes == 13 * BLOCK
    assert report.tenants["t"].reserved_bytes == 13 * BLOCK
    sequence.last_step_id = 0
    memory.free(sequence)
    report = memory_report(memory, [])
    assert (report.in_flight_bytes, report.free_bytes) == (16 * BLOCK, 48 * BLOCK)
    assert report.total_bytes == 64 * BLOCK
    memory.end_step(0)
    assert memory_report(memory, []).free_bytes == 64 * BLOCK


CONFIG = KVCacheConfig((KVGroup((0,), KVKind.FULL, 64),), 64, 4, enable_prefix_caching=False)


def test_a_prefix_cache_is_refused() -> None:
    cached = replace(CONFIG, enable_prefix_caching=True)
    with pytest.raises(ConfigurationError, match="enable_prefix_caching is True, but contiguous"):
        contiguous("max")(cached, MAX_MODEL_LEN)


def test_each_allocator_has_a_name() -> None:
    memories = {name: find_allocator(name)(CONFIG, MAX_MODEL_LEN) for name in KV_ALLOCATORS}
    assert type(memories["paged"]) is KVCacheManager
    sequence = make_sequence(5, 25)
    reserved = {
        name: memory.num_blocks_to_admit(sequence, memory.match(sequence))
        for name, memory in memories.items()
    }
    assert reserved == {
        "contiguous_max": 16,
        "contiguous_pow2": 16,  # 10, by buddy
        "contiguous_oracle": 8,
        "paged": 2,
    }


def test_an_unknown_allocator_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_allocator is 'orca', but must be one of cont"):
        find_allocator("orca")
