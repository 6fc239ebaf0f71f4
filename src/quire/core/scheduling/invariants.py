"""Checks of the scheduler's accounting, for tests and the simulator.

They hold after any step. A check costs O(all blocks and sequences).

Every block is accounted for exactly once: free, or held with a reference count that equals its
holders (table entries, steps and moves in flight). Every row is free or has one owner. Every
adapter in use has a slot of its own.
"""

from collections import Counter

from quire.core.adapters import BASE_MODEL, NO_SLOT
from quire.core.content_spans import last_cut
from quire.core.memory.growth import Growth
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import HOLE_BLOCK


def check_memory(memory: KVCacheManager, live: list[Sequence]) -> None:
    """Raise AssertionError unless pool, cache and the tables of `live` sequences agree."""
    pool = memory.pool
    holders = Counter(memory.deferred.blocks())
    assert memory.deferred.num_blocks == holders.total()
    if memory.moves is not None:
        holders.update(memory.moves.blocks())
    assert HOLE_BLOCK not in holders
    for sequence in [*live, *memory.leaving]:
        for table in sequence.block_tables:
            holders.update(table)
    holders.pop(HOLE_BLOCK, None)
    counts = {block: count for block, count in enumerate(pool.ref_count) if count}
    assert counts == dict(holders), _difference(counts, holders)
    free = pool.free_ids()
    distinct = set(free)
    assert len(free) == len(distinct) == pool.num_free
    assert distinct.isdisjoint(counts), "a held block is in the free list"
    assert len(free) + len(counts) == pool.num_blocks
    found = {
        block: (group, digest)
        for group in range(memory.num_groups)
        for digest, block in memory.cache.entries(group).items()
    }
    named = {block: key for block, key in enumerate(pool.content) if key is not None}
    assert found == named, "the prefix cache and the pool disagree on contents"
    memory.cache.check()
    memory.resume_points.check()


def check_sequence(sequence: Sequence, growth: Growth) -> None:
    """Raise AssertionError unless the sequence's own counts agree."""
    block_size = growth.block_size
    assert (sequence.row is not None) == (sequence.state is SequenceState.RUNNING), sequence
    assert not sequence.block_tables or sequence.state is not SequenceState.WAITING, sequence
    check_tables(sequence, growth)
    assert sequence.num_computed_tokens <= sequence.num_tokens, sequence
    assert sequence.num_computed_tokens <= sequence.num_slots, sequence
    computed = sequence.num_computed_tokens
    assert last_cut(sequence.content_spans, computed) == computed, f"{sequence} splits a content"
    assert sequence.num_confirmed_tokens <= sequence.num_computed_tokens, sequence
    assert sequence.num_published_blocks * block_size <= sequence.num_computed_tokens, sequence
    assert len(sequence.token_ids) <= sequence.max_num_tokens, sequence
    if computed < sequence.plain_end:
        assert sequence.row is not None and sequence.num_tokens == computed + 1, sequence
        assert sequence.has_plain_outputs and sequence.constraint is None, sequence
        most = 0 if sequence.shares_tail else sequence.num_slots
        assert sequence.plain_end <= min(most, sequence.max_num_tokens - 2), sequence
    if sequence.draft_token_ids:
        assert sequence.num_pending_tokens == 1, f"{sequence} has drafts behind unknown tokens"
        end = sequence.num_computed_tokens + len(sequence.draft_token_ids)
        assert sequence.row is None or end <= sequence.num_slots, f"{sequence} has no slots"
    if sequence.state is SequenceState.PREEMPTED:
        kept = -(-sequence.num_computed_tokens // block_size)
        for rule in growth.growing if sequence.block_tables else ():
            num_entries = len(sequence.block_tables[rule.group])
            assert num_entries == kept, f"{sequence} keeps blocks that it did not compute"


def check_tables(sequence: Sequence, growth: Growth) -> None:
    """Raise AssertionError unless each table obeys its group's growth rule."""
    tables = sequence.block_tables
    if not tables:
        assert not sequence.num_slots, sequence
        return
    num_computed = sequence.num_computed_tokens
    lengths = [len(tables[rule.group]) * growth.block_size for rule in growth.growing]
    assert not lengths or min(lengths) == sequence.num_slots, sequence
    for rule in growth.unbounded:
        assert HOLE_BLOCK not in tables[rule.group], f"{sequence} has a hole where all is kept"
        assert growth.windows or lengths[0] == sequence.num_slots, sequence
    for window in growth.windows:
        table = tables[window.group]
        num_holes = table.count(HOLE_BLOCK)
        assert table[:num_holes] == [HOLE_BLOCK] * num_holes, f"{sequence} has holes within"
        assert num_holes <= window.first_needed(num_computed), f"{sequence} lacks what it reads"
    for state in growth.states:
        assert len(tables[state.group]) in (state.num_blocks, 0), sequence
        assert tables[state.group] or not num_computed, f"{sequence} has lost its state"


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError unless all invariants hold between two calls of the scheduler."""
    running_set, waiting = scheduler.running_set, list(scheduler.waiting)
    live = [*running_set.running, *waiting]
    assert len(live) == len({id(sequence) for sequence in live})
    assert all(sequence.state is SequenceState.RUNNING for sequence in running_set.running)
    preempted = {sequence for sequence in waiting if sequence.state is SequenceState.PREEMPTED}
    assert all(
        sequence.state is SequenceState.WAITING for sequence in waiting if sequence not in preempted
    )
    assert preempted == set(running_set.preempted)
    for ordered in (running_set.running, running_set.preempted):
        assert ordered == sorted(ordered, key=lambda sequence: sequence.rank)
    rows = [*(sequence.row for sequence in running_set.running), *running_set.free_rows]
    assert sorted(row for row in rows if row is not None) == list(
        range(scheduler.config.max_num_seqs)
    )
    assert running_set.num_constrained == len(
        [sequence for sequence in running_set.running if sequence.constraint is not None]
    )
    scheduler.adapters.check(
        Counter(sequence.adapter for sequence in running_set.running if sequence.adapter)
    )
    scheduler.contents.check(Counter())
    slots = scheduler.adapters.slots() | {BASE_MODEL: NO_SLOT}
    for sequence in running_set.running:
        assert sequence.adapter_slot == slots[sequence.adapter], f"{sequence} is in a wrong slot"
    for sequence in live:
        check_sequence(sequence, scheduler.memory.growth)
        assert all(child.parent is sequence for child in sequence.forks), sequence
        assert sequence.parent is None or not sequence.parent.is_finished, sequence
    check_memory(scheduler.memory, live)


def check_idle(scheduler: Scheduler) -> None:
    """Raise AssertionError unless nothing is held at the end of a workload."""
    assert not scheduler.has_unfinished and scheduler.num_steps_in_flight == 0
    assert not scheduler.memory.leaving
    assert scheduler.memory.pool.num_held == 0, f"{scheduler.memory.pool.num_held} blocks held"
    check_scheduler(scheduler)


def _difference(counts: dict[int, int], holders: Counter[int]) -> str:
    wrong = {
        block: (counts.get(block, 0), holders.get(block, 0))
        for block in counts.keys() | holders.keys()
        if counts.get(block, 0) != holders.get(block, 0)
    }
    return f"blocks whose reference count differs from their holders (count, holders): {wrong}"
