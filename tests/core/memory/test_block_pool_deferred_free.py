"""References of steps in flight: taken over, counted, and released with their step."""

import pytest

from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.step import BlockCopy


def make() -> tuple[BlockPool, DeferredFrees]:
    """A pool of which blocks 0 to 7 are held once."""
    pool = BlockPool(10)
    assert sorted(pool.take(8)[0]) == list(range(8))
    return pool, DeferredFrees(pool)


def test_each_step_releases_what_it_held_when_it_has_ended() -> None:
    pool, holds = make()
    holds.hold(5, [0, 1])
    holds.hold(4, [2])
    holds.hold(6, [3])
    assert (holds.num_blocks, holds.blocks(), pool.num_free) == (4, [0, 1, 2, 3], 2)
    holds.end_step(3)
    assert holds.num_blocks == 4
    holds.end_step(4)
    assert (holds.blocks(), pool.num_free) == ([0, 1, 3], 3)
    holds.end_step(6)
    assert (holds.num_blocks, holds.blocks(), pool.num_free) == (0, [], 6)


def test_a_block_may_be_held_several_times() -> None:
    pool, holds = make()
    pool.share(0)
    holds.hold(1, [0])
    holds.hold(2, [0])
    holds.end_step(1)
    assert pool.ref_count[0] == 1
    holds.end_step(2)
    assert pool.ref_count[0] == 0


def test_sources_and_targets_of_copies_are_known_until_the_step_has_ended() -> None:
    pool, holds = make()
    pool.share(0)
    holds.hold_copied(1, [BlockCopy(0, 4), BlockCopy(1, 5)])
    holds.hold_copied(2, [BlockCopy(0, 6)])
    assert dict(holds.num_copied_from) == {0: 2, 1: 1}
    incomplete = [block for block in range(8) if holds.is_incomplete(block)]
    assert incomplete == [4, 5, 6]
    holds.end_step(1)
    assert dict(holds.num_copied_from) == {0: 1}
    assert holds.is_incomplete(6) and not holds.is_incomplete(4)
    holds.end_step(2)
    assert not holds.num_copied_from and not holds.is_incomplete(6)
    assert pool.ref_count[:2] == [0, 0]


def test_a_plain_hold_waits_for_no_copy() -> None:
    _, holds = make()
    holds.hold(1, [3])
    assert not holds.num_copied_from and not holds.is_incomplete(3)


def test_more_references_than_there_are_cannot_be_taken_over() -> None:
    _, holds = make()
    holds.hold(1, [0, 0])
    with pytest.raises(AssertionError, match="released more often"):
        holds.end_step(1)
