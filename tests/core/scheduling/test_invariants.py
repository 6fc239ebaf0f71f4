"""The checker finds each kind of broken accounting; a check that finds nothing proves nothing."""

from collections.abc import Callable

import pytest
from tests.core.harness import Harness, greedy_harness, make_memory

from quire.core.scheduling import invariants
from quire.core.sequence import SequenceState


def running() -> Harness:
    harness = greedy_harness(make_memory(num_groups=2, num_blocks=20), max_num_seqs=3)
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
    harness.memory.cache.remove_run([(0, digest)])


def forget_in_pool_only(harness: Harness) -> None:
    harness.memory.pool.content[harness.scheduler.running[0].block_tables[0][0]] = None


def leak_to_a_step(harness: Harness) -> None:
    harness.memory.deferred.hold(9, [19])


def two_owners_of_a_row(harness: Harness) -> None:
    harness.scheduler.running[1].row = harness.scheduler.running[0].row


def lose_row(harness: Harness) -> None:
    harness.scheduler.running[0].row = None


def row_free_and_owned(harness: Harness) -> None:
    harness.scheduler.running_set.free_rows.append(0)


def in_both_lists(harness: Harness) -> None:
    harness.scheduler.waiting.add(harness.scheduler.running[-1])


def preempted_but_unknown(harness: Harness) -> None:
    harness.scheduler.running_set.preempt(harness.scheduler.running[-1], 0)
    harness.scheduler.running_set.preempted.clear()


def keep_what_was_not_computed(harness: Harness) -> None:
    sequence = harness.scheduler.running[-1]
    harness.scheduler.running_set.preempt(sequence, 0)
    sequence.num_computed_tokens = 2


def write_beyond_computed(harness: Harness) -> None:
    harness.scheduler.running[0].num_confirmed_tokens = 7


def fork_of_another(harness: Harness) -> None:
    first, second, _ = harness.scheduler.running
    child = first.branch(1, first.params)
    child.fork_from(first)
    second.forks.append(child)


def fork_of_one_that_is_gone(harness: Harness) -> None:
    gone, waiting = harness.scheduler.running[0], next(iter(harness.scheduler.waiting))
    waiting.parent = gone.branch(1, gone.params)
    waiting.parent.move_to(SequenceState.FINISHED)


def tell_other_tokens(harness: Harness) -> None:
    cache = harness.memory.cache
    digest, (parent, _, is_first) = next(iter(cache.nodes.items()))
    cache.nodes[digest] = parent, bytes(16), is_first


def compute_beyond_slots(harness: Harness) -> None:
    harness.scheduler.running[0].num_computed_tokens = 99


def publish_beyond_computed(harness: Harness) -> None:
    harness.scheduler.running[0].num_published_blocks = 99


def draft_behind_unknown_tokens(harness: Harness) -> None:
    harness.scheduler.running[0].draft_token_ids = (5,)


def draft_without_slots(harness: Harness) -> None:
    sequence = harness.scheduler.running[0]
    sequence.draft_token_ids, sequence.num_pending_tokens = (5,) * 99, 1


def table_of_other_length(harness: Harness) -> None:
    block = harness.memory.pool.take(1)[0]
    harness.scheduler.running[0].block_tables[0].extend(block)


def too_long(harness: Harness) -> None:
    next(iter(harness.scheduler.waiting)).token_ids.extend(range(50))


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
        preempted_but_unknown,
        keep_what_was_not_computed,
        write_beyond_computed,
        fork_of_another,
        fork_of_one_that_is_gone,
        tell_other_tokens,
        compute_beyond_slots,
        publish_beyond_computed,
        draft_behind_unknown_tokens,
        draft_without_slots,
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
