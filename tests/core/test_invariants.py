"""The checker finds each kind of broken accounting; a check that finds nothing proves nothing."""

from collections.abc import Callable

import pytest
from tests.core.harness import Harness, make_memory

from quire.core import invariants


def running() -> Harness:
    harness = Harness(make_memory(num_groups=2, num_blocks=20), max_num_seqs=3)
    for name in "abcd":
        harness.add(name, 6, 9)
    harness.step()
    return harness


def swap_running(harness: Harness) -> None:
    harness.scheduler.running.reverse()


def lose_reference(harness: Harness) -> None:
    harness.memory.pool.ref_count[0] = 0


def count_twice(harness: Harness) -> None:
    harness.memory.pool.ref_count[harness.scheduler.running[0].block_tables[0][0]] += 1


def free_held(harness: Harness) -> None:
    harness.memory.pool.release(harness.scheduler.running[0].block_tables[1][0])


def forget_in_cache_only(harness: Harness) -> None:
    digest = next(iter(harness.memory.cache.entries(0)))
    harness.memory.cache.remove(0, digest)


def forget_in_pool_only(harness: Harness) -> None:
    harness.memory.pool.content[harness.scheduler.running[0].block_tables[0][0]] = None


def leak_to_a_step(harness: Harness) -> None:
    harness.memory._held_by_steps.append((9, [19]))


def two_owners_of_a_row(harness: Harness) -> None:
    harness.scheduler.running[1].row = harness.scheduler.running[0].row


def lose_row(harness: Harness) -> None:
    harness.scheduler.running[0].row = None


def row_free_and_owned(harness: Harness) -> None:
    harness.scheduler.free_rows.append(0)


def in_both_lists(harness: Harness) -> None:
    harness.scheduler.waiting.append(harness.scheduler.running[-1])


def compute_beyond_slots(harness: Harness) -> None:
    harness.scheduler.running[0].num_computed_tokens = 99


def publish_beyond_computed(harness: Harness) -> None:
    harness.scheduler.running[0].num_published_blocks = 99


def table_of_other_length(harness: Harness) -> None:
    block = harness.memory.pool.take(1)[0]
    harness.scheduler.running[0].block_tables[0].extend(block)


def too_long(harness: Harness) -> None:
    harness.scheduler.waiting[0].token_ids.extend(range(50))


@pytest.mark.parametrize(
    "break_it",
    [
        swap_running,
        lose_reference,
        count_twice,
        free_held,
        forget_in_cache_only,
        forget_in_pool_only,
        leak_to_a_step,
        two_owners_of_a_row,
        lose_row,
        row_free_and_owned,
        in_both_lists,
        compute_beyond_slots,
        publish_beyond_computed,
        table_of_other_length,
        too_long,
    ],
)
def test_broken_accounting_is_found(break_it: Callable[[Harness], None]) -> None:
    harness = running()
    invariants.check_scheduler(harness.scheduler)
    break_it(harness)
    with pytest.raises(AssertionError):
        invariants.check_scheduler(harness.scheduler)


def test_the_message_names_the_blocks_and_both_counts() -> None:
    memory = make_memory()
    memory.pool.take(2)
    with pytest.raises(AssertionError, match=r"\(count, holders\): \{0: \(1, 0\), 1: \(1, 0\)\}"):
        invariants.check_memory(memory, [])


def test_idle_means_nothing_is_left() -> None:
    harness = running()
    with pytest.raises(AssertionError):
        invariants.check_idle(harness.scheduler)
    harness.run()
    invariants.check_idle(harness.scheduler)
    harness.memory.pool.take(1)
    with pytest.raises(AssertionError, match="1 blocks held"):
        invariants.check_idle(harness.scheduler)
