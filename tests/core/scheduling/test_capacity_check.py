"""Whether a waiting sequence fits, and how starts are spaced out in a crowd."""

from typing import Any

from tests.core.harness import Harness, make_memory

from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.capacity_check import LONGEST_PAUSE_STEPS, RECHECK_STEPS, Verdict
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.sequence import Sequence, SequenceState

WAITING = SequenceState.WAITING


def verdict(harness: Harness, sequence: Sequence, step_id: int = 100) -> object:
    found = harness.scheduler.admission.capacity.check(sequence, step_id)
    return found if isinstance(found, Verdict) else found.num_tokens


def test_no_row_is_no_room() -> None:
    harness = Harness(max_num_seqs=1, budget=16)
    harness.add("a", 3, 3)
    harness.step()
    assert verdict(harness, harness.add("b", 3, 3)) is Verdict.NO_CAPACITY


def test_each_that_outranks_it_is_left_room_to_grow_once() -> None:
    harness = Harness(make_memory(num_blocks=4))
    harness.add("a", 8, 8)
    harness.step()
    newcomer = harness.add("b", 5, 1)
    harness.step()  # two blocks are free and two are needed, but "a" will soon need one
    assert newcomer.row is None
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions == 0


def test_a_higher_rank_may_take_all_free_blocks() -> None:
    harness = Harness(make_memory(num_blocks=4), policy=PriorityPolicy())
    harness.add("a", 8, 8, priority=5)
    harness.step()
    harness.add("b", 5, 1, priority=0)
    assert verdict(harness, next(iter(harness.scheduler.waiting))) == 0


def test_a_look_in_vain_is_repeated_only_now_and_then_unless_there_is_room() -> None:
    harness = Harness(make_memory(num_blocks=8))
    harness.add("a", 16, 4)
    harness.step()
    sequence = harness.add("b", 25, 1)
    looks: list[int] = []
    match = harness.memory.match

    def match_and_note(sequence: Sequence) -> PrefixMatch:
        looks.append(1)
        return match(sequence)

    harness.memory.match = match_and_note  # type: ignore[assignment, method-assign]
    for step_id in range(2 * RECHECK_STEPS):
        assert verdict(harness, sequence, step_id) is Verdict.NO_CAPACITY
    assert len(looks) == 2
    assert harness.scheduler.admission.capacity._failed[sequence].num_missing_blocks == 7
    harness.memory.match = match  # type: ignore[assignment, method-assign]
    harness.scheduler.abort(harness.requests["a"][1])
    assert verdict(harness, sequence, 0) == 0, "as many blocks as it lacked are free"


def test_only_ends_of_their_own_are_learned_from() -> None:
    harness = Harness()
    lengths: list[int] = []
    harness.scheduler.admission.capacity.forecast.lengths.observe = lengths.append  # type: ignore[assignment, method-assign]
    aborted = harness.add("a", 3, 5)
    harness.add("b", 3, 2)
    harness.step()
    harness.scheduler.abort(aborted)
    harness.run()
    assert lengths == [2]


def test_a_fork_follows_its_parent_until_that_has_computed_all_that_is_common() -> None:
    harness = Harness(make_memory(num_blocks=30, caching=False), budget=4)
    parent, child = harness.add_branches("a", 10, 4, n=2)
    capacity = harness.scheduler.admission.capacity
    expected = []
    for _ in range(3):
        expected.append(capacity.follows(child, harness.memory.match(child)))
        harness.step()
    assert expected == [True, True, True]
    assert child.state is not WAITING, "it has joined the step in which that was done"
    assert parent.num_computed_tokens == 10
    harness.run()


def test_a_fork_follows_no_parent_that_it_outranks() -> None:
    harness = Harness(make_memory(num_blocks=30))
    parent, child = harness.add_branches("a", 10, 4, n=2)
    child.rank, parent.rank = (0.0,), (1.0,)
    assert not harness.scheduler.admission.capacity.follows(child, harness.memory.match(child))


# ---- a crowd starts apart -----------------------------------------------------------------------


def after_a_start(num_prompt: int, num_outputs: int, **options: Any) -> Harness:
    """One has started in step 0 of a pool of 100 blocks, and another did not fit."""
    harness = Harness(make_memory(num_blocks=100), **options)
    for _ in range(50):
        harness.scheduler.admission.capacity.forecast.lengths.observe(num_outputs)
    harness.add("first", num_prompt, num_outputs, priority=1)
    harness.step()
    harness.scheduler.admission.capacity.is_crowded = True
    return harness


def test_in_a_crowd_the_pause_is_the_share_of_the_pool_that_one_will_use() -> None:
    """For 40 steps 2 blocks and, on average, 5 more: the pool of 100 gives that in 2.8 steps."""
    harness = after_a_start(8, 40)
    like = harness.add("like", 8, 40)
    assert [verdict(harness, like, step_id) for step_id in (1, 2, 3)] == [
        Verdict.NO_CAPACITY,
        Verdict.NO_CAPACITY,
        0,
    ]
    # The next one is due after 5.6 steps, not 3 + 2.8: what was left of the third is not lost.
    next_one = harness.add("next", 8, 40)
    assert [verdict(harness, next_one, step_id) for step_id in (5, 6)] == [Verdict.NO_CAPACITY, 0]


def test_starts_do_not_pause_without_a_crowd() -> None:
    harness = after_a_start(8, 40)
    harness.scheduler.admission.capacity.is_crowded = False
    assert verdict(harness, harness.add("like", 8, 40), 1) == 0


def test_a_small_one_pauses_for_a_share_of_its_own() -> None:
    harness = after_a_start(8, 40)
    assert verdict(harness, harness.add("small", 1, 1), 1) == 0


def test_a_pause_is_bounded() -> None:
    """The share would be 140 * (10 + 35 / 2) / 100 = 38.5 steps."""
    harness = after_a_start(40, 140)
    like = harness.add("like", 40, 140)
    assert verdict(harness, like, LONGEST_PAUSE_STEPS - 1) is Verdict.NO_CAPACITY
    assert verdict(harness, like, LONGEST_PAUSE_STEPS) == 0


def test_a_sequence_that_outranks_a_running_one_skips_the_pause() -> None:
    harness = after_a_start(8, 40, policy=PriorityPolicy())
    assert verdict(harness, harness.add("lower", 8, 40, priority=2), 1) is Verdict.NO_CAPACITY
    assert verdict(harness, harness.add("higher", 8, 40), 1) == 0


def test_a_preempted_sequence_skips_the_pause() -> None:
    harness = after_a_start(8, 40)
    second = harness.add("second", 8, 40)
    harness.scheduler.admission.capacity.is_crowded = False
    harness.step()
    harness.scheduler.running_set.preempt(second, 0)
    harness.scheduler.admission.capacity.is_crowded = True
    assert verdict(harness, second, 2) != Verdict.NO_CAPACITY


def test_crowding_ends_when_no_sequence_waits() -> None:
    harness = Harness(make_memory(num_blocks=12))
    capacity = harness.scheduler.admission.capacity
    harness.add("a", 8, 39)
    harness.step()
    assert not capacity.is_crowded
    harness.add("b", 8, 39)
    harness.step()
    assert capacity.is_crowded
    harness.run()
    assert not capacity.is_crowded


def test_the_crowd_is_over_when_all_are_aborted() -> None:
    harness = Harness(make_memory(num_blocks=12))
    capacity = harness.scheduler.admission.capacity
    sequences = [harness.add(name, 8, 39) for name in "ab"]
    harness.step()
    assert capacity.is_crowded
    for sequence in sequences:
        harness.scheduler.abort(sequence)
    assert not capacity.is_crowded
