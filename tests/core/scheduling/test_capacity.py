"""Whether a waiting sequence fits, now and as the others are predicted to grow."""

from typing import Any

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.admission import LONGEST_PAUSE_STEPS, LOOK_AGAIN_STEPS, Verdict
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


def test_who_outranks_the_others_leaves_them_nothing() -> None:
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
    for step_id in range(2 * LOOK_AGAIN_STEPS):
        assert verdict(harness, sequence, step_id) is Verdict.NO_CAPACITY
    assert len(looks) == 2
    assert harness.scheduler.admission.capacity._failed[sequence].num_missing_blocks == 7
    harness.memory.match = match  # type: ignore[assignment, method-assign]
    harness.scheduler.abort(harness.requests["a"][1])
    assert verdict(harness, sequence, 0) == 0, "as many blocks as it lacked are free"


def test_growth_is_predicted_from_what_has_ended() -> None:
    """Two sequences of 8 tokens fit now; whether they will depends on how long outputs are."""
    admitted = {}
    for num_outputs in (4, 40):
        harness = Harness(make_memory(num_blocks=12))
        for _ in range(50):
            harness.scheduler.admission.capacity.lengths.observe(num_outputs)
        harness.add("a", 8, 39)
        harness.step()
        second = harness.add("b", 8, 39)
        harness.step()
        admitted[num_outputs] = second.state is not WAITING
    assert admitted == {4: True, 40: False}


def test_what_several_share_counts_once() -> None:
    """Each branch holds ten blocks, but all together hold hardly more."""
    harness = Harness(make_memory(num_blocks=30), max_num_seqs=4)
    branches = harness.add_branches("a", 40, 4, n=4)
    harness.step()
    assert all(branch.state is not WAITING for branch in branches)
    harness.run()


def test_only_ends_of_their_own_are_learned_from() -> None:
    harness = Harness()
    lengths: list[int] = []
    harness.scheduler.admission.capacity.lengths.observe = lengths.append  # type: ignore[assignment, method-assign]
    aborted = harness.add("a", 3, 5)
    harness.add("b", 3, 2)
    harness.step()
    harness.scheduler.abort(aborted)
    harness.run()
    assert lengths == [2]


def test_a_fork_follows_its_parent_until_that_has_computed_all_that_is_common() -> None:
    harness = Harness(make_memory(num_blocks=30, caching=False), budget=4)
    parent, child = harness.add_branches("a", 10, 4, n=2)
    room = harness.scheduler.admission.capacity
    expected = []
    for _ in range(3):
        expected.append(room.follows(child, harness.memory.match(child)))
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
    """One has started in step 0 of a pool of 100 blocks, and somebody has found no room."""
    harness = Harness(make_memory(num_blocks=100), **options)
    for _ in range(50):
        harness.scheduler.admission.capacity.lengths.observe(num_outputs)
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


def test_without_a_crowd_nobody_pauses() -> None:
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


def test_who_outranks_a_running_one_does_not_pause() -> None:
    harness = after_a_start(8, 40, policy=PriorityPolicy())
    assert verdict(harness, harness.add("lower", 8, 40, priority=2), 1) is Verdict.NO_CAPACITY
    assert verdict(harness, harness.add("higher", 8, 40), 1) == 0


def test_who_ran_before_does_not_pause() -> None:
    harness = after_a_start(8, 40)
    second = harness.add("second", 8, 40)
    harness.scheduler.admission.capacity.is_crowded = False
    harness.step()
    harness.scheduler.running_set.preempt(second, 0)
    harness.scheduler.admission.capacity.is_crowded = True
    assert verdict(harness, second, 2) != Verdict.NO_CAPACITY


def test_the_crowd_is_over_when_nobody_waits() -> None:
    harness = Harness(make_memory(num_blocks=12))
    room = harness.scheduler.admission.capacity
    harness.add("a", 8, 39)
    harness.step()
    assert not room.is_crowded
    harness.add("b", 8, 39)
    harness.step()
    assert room.is_crowded
    harness.run()
    assert not room.is_crowded


@pytest.mark.parametrize("num_groups", [1, 2])
def test_where_all_could_grow_to_their_limits_no_forecast_is_made_and_none_would_say_no(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pools of any size: what is said is the same with and without the shortcut."""
    answers: set[tuple[bool, bool]] = set()
    for num_blocks in range(6, 30):
        harness = Harness(make_memory(num_blocks * num_groups, num_groups=num_groups))
        room = harness.scheduler.admission.capacity
        for length in (3, 8, 30):
            room.lengths.observe(length)
        harness.add("a", 7, 16)
        harness.add_branches("b", 9, 9, n=2)
        for _ in range(5):
            harness.step()
        newcomer = harness.add("c", 5, 11)
        needed = harness.memory.blocks_for(5)
        is_sure = room._fit_all(newcomer)
        with monkeypatch.context() as patch:
            patch.setattr(room, "_fit_all", lambda _: False)
            fits = room.fits_later(newcomer, needed)
        assert room.fits_later(newcomer, needed) is fits
        assert fits or not is_sure
        answers.add((is_sure, fits))
    assert answers == {(True, True), (False, True), (False, False)}
