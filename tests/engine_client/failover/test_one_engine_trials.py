"""Who is to blame for the deaths of an engine that is the only one, and who waits meanwhile."""

import pytest
from tests.engine_client.failover.one_engine_world import COMPUTING, KILLED, SEGFAULT, OneEngine

from quire.core.request import FinishReason
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death

NOTHING: frozenset[Death] = frozenset()


def test_suspects_are_tried_one_after_the_other_and_new_ones_wait() -> None:
    world = OneEngine("a")
    world.open("b", n=2)
    world.bring("b")
    assert world.crash() == NOTHING and world.dispatcher.trials.attribution.num_waiting == 1
    world.open("new")
    assert world.sent() == ["a"], "the one with the least output first"
    world.bring("a")
    assert world.sent() == [], "one token may not be all that was lost"
    world.bring("a")
    assert world.sent() == ["b"]
    world.prove("b")
    assert world.sent() == ["new"]
    world.open("newer")
    assert world.sent() == ["newer"]


def test_only_those_in_the_step_are_suspects_and_the_others_wait_before_the_new_ones() -> None:
    world = OneEngine("a", "b", "c", "d")
    world.crash("b", "d")
    world.open("new")
    assert world.sent() == ["b"]
    world.prove("b")
    assert world.sent() == ["d"]
    world.prove("d")
    assert world.sent() == ["a", "c", "new"]


@pytest.mark.parametrize(
    "death",
    [
        Death(Activity(Doing.COMPUTING, None), KILLED, num_oom_kills=0),
        Death(Activity(Doing.IDLE), SEGFAULT),
        Death(Activity(Doing.LOADING), KILLED, num_oom_kills=1),
    ],
)
def test_a_death_from_outside_puts_no_request_on_trial(death: Death) -> None:
    world = OneEngine("a", "b")
    assert world.die(death) == NOTHING
    world.open("new")
    assert world.sent() == ["a", "b", "new"] and not world.blamed


def test_deaths_from_outside_change_nothing_of_a_trial() -> None:
    world = OneEngine("a", "b", "c")
    world.crash()
    assert world.sent() == ["a"]
    world.prove("a")
    assert world.sent() == ["b"]
    for _ in range(5):
        assert world.kill() == NOTHING
        assert world.sent() == ["b"], "those that are cleared wait beside the new ones"
    world.prove("b")
    assert world.sent() == ["c"]
    assert len(world.crash("b", "c")) == 1
    for _ in range(5):
        assert world.sent() == ["c"], "alone"
        assert world.kill() == NOTHING
    world.prove("c")
    assert world.sent() == ["c", "b"]
    world.prove("b")
    assert world.sent() == ["a"] and not world.blamed


def test_a_crash_on_a_trial_alone_blames_the_one_on_trial() -> None:
    world = OneEngine("a", "b", "c")
    first = Death(COMPUTING, SEGFAULT)
    assert world.die(first) == NOTHING
    world.prove("a")
    assert world.sent() == ["a", "b"]
    world.open("new")
    second = Death(COMPUTING, SEGFAULT)
    assert world.die(second) == frozenset([second]), "what follows will show"
    assert world.sent() == ["b"], "the second trial is its alone"
    third = Death(COMPUTING, None, has_hung=True)
    assert world.die(third) == frozenset([first, second, third]) and world.blamed == ["b"]
    assert world.sent() == ["c", "a", "new"], "nobody else is suspected of these deaths"
    assert world.crash() == NOTHING, "a new death, and all are suspects again"
    assert world.sent() == ["c"]


def test_a_request_that_crashes_the_first_trial_alone_is_ended_after_two_deaths() -> None:
    world = OneEngine("a", "b")
    assert world.crash() == NOTHING and world.sent() == ["a"]
    assert len(world.crash()) == 2 and world.blamed == ["a"] and world.sent() == ["b"]


def test_a_cleared_suspect_puts_the_others_of_its_step_on_trial() -> None:
    world = OneEngine("a", "b", "c")
    world.crash("a", "b")
    world.prove("a")
    assert world.sent() == ["a", "b"]
    world.crash("a", "b")  # it was a
    assert world.sent() == ["b"]
    world.prove("b")
    assert world.sent() == ["a"]
    world.crash("a", "b")
    assert world.sent() == ["a"]
    explained = world.crash("a")
    assert world.blamed == ["a"] and len(explained) == 3, "the deaths but for the first"
    assert world.sent() == ["b", "c"]


def test_a_step_without_the_one_on_trial_says_nothing_about_it() -> None:
    world = OneEngine("a", "b")
    world.crash()
    world.prove("a")
    assert world.sent() == ["a", "b"]
    assert world.crash("a") == NOTHING
    assert world.sent() == ["b"], "it is tried again"
    world.prove("b")
    assert world.sent() == ["a"]
    world.prove("a")
    world.open("new")
    assert world.sent() == ["new"] and not world.blamed


@pytest.mark.parametrize("num_oom_kills", [1, None])
def test_where_memory_ran_out_all_others_are_tried_between_two_trials(
    num_oom_kills: int | None,
) -> None:
    world = OneEngine("a", "b", "c")
    world.kill(num_oom_kills=num_oom_kills)
    assert world.sent() == ["a"]
    assert world.kill(num_oom_kills=num_oom_kills) == NOTHING
    assert world.sent() == ["b"]
    world.prove("b")
    assert world.sent() == ["c"]
    world.prove("c")
    assert world.sent() == ["a"]
    explained = world.kill(num_oom_kills=num_oom_kills)
    assert world.blamed == ["a"] and len(explained) == 3


def test_no_request_is_blamed_if_others_die_of_memory_too() -> None:
    world = OneEngine("a", "b", "c")
    world.kill(num_oom_kills=1)
    for name in ("a", "b", "c", "a", "b", "c"):
        assert world.sent() == [name]
        assert world.kill(num_oom_kills=1) == NOTHING
    assert not world.blamed


def test_a_request_that_has_the_process_to_itself_and_uses_up_its_memory_ends() -> None:
    """There is nobody else to try between its trials: so it has three."""
    world = OneEngine("a")
    for _ in range(3):
        assert world.kill(num_oom_kills=1) == NOTHING
        assert world.sent() == ["a"]
    assert len(world.kill(num_oom_kills=1)) == 4 and world.blamed == ["a"]


def test_a_death_while_the_process_starts_changes_nothing() -> None:
    world = OneEngine("a", "b")
    for _ in range(3):
        world.dispatcher.on_death("", Death(COMPUTING, SEGFAULT))
    world.start()
    assert world.sent() == ["a"] and not world.blamed


def test_a_suspect_that_ends_on_trial_makes_room_for_the_next() -> None:
    world = OneEngine("a", "b")
    world.crash()
    world.bring("a", end=FinishReason.STOP)
    assert world.sent() == ["a", "b"]


def test_a_request_that_was_dropped_is_not_sent_again() -> None:
    world = OneEngine("a", "b")
    world.dispatcher.abort("b")
    world.crash()
    world.open("c")
    world.dispatcher.abort("c")
    assert world.sent() == ["a"]
    world.prove("a")
    assert world.sent() == []


def test_a_suspect_dropped_on_trial_can_be_blamed_until_the_process_removed_it() -> None:
    world = OneEngine("a", "b")
    world.crash()
    world.dispatcher.abort("a")
    assert world.sent() == ["a"], "the process may be in the very step that kills it"
    assert len(world.crash("a")) == 2
    assert world.sent() == ["b"]
    world.open("new")
    assert world.sent() == ["new"], "b is cleared"


def test_a_trial_ends_when_the_process_removed_the_dropped_suspect() -> None:
    world = OneEngine("a", "b")
    world.crash()
    world.dispatcher.abort("a")
    assert world.sent() == ["a"]
    world.wire.between_steps()
    assert world.sent() == ["b"]
    assert len(world.crash()) == 2 and world.blamed == ["b"]


def test_a_suspect_that_leaves_does_not_end_the_trial_of_its_successor() -> None:
    world = OneEngine("a", "b", "c")
    world.crash()
    world.dispatcher.abort("a")
    world.crash("a")
    world.open("a")  # the name is free again
    assert world.sent() == ["b", "c", "a"]


def test_branches_that_had_not_begun_need_not_prove_anything() -> None:
    world = OneEngine()
    world.open("a", n=3)
    world.open("b")
    world.bring("a", 0), world.bring("a", 1), world.bring("b", 0, 1, 2, 3)
    world.crash()
    assert world.sent() == ["a"]
    world.bring("a", 0, 1, 2)
    assert world.sent() == []
    world.bring("a", 1, 1, 2)
    assert world.sent() == ["b"]


def test_one_branch_clears_a_request_that_had_not_begun() -> None:
    world = OneEngine()
    world.open("a", n=3)
    world.open("b")
    world.crash()
    assert world.sent() == ["a"]
    world.bring("a", 2, 1, 2)
    assert world.sent() == ["b"]


def test_branches_that_end_on_trial_prove_themselves() -> None:
    world = OneEngine()
    world.open("a", n=2)
    world.open("b")
    world.bring("a", 0), world.bring("a", 1), world.bring("b", 0, 1, 2, 3)
    world.crash()
    assert world.sent() == ["a"]
    world.bring("a", 0, end=FinishReason.STOP)
    assert world.sent() == []
    world.bring("a", 1, 1, 2)
    assert world.sent() == ["b"]


def test_beam_searches_are_tried_last_and_new_ones_do_not_wait_for_them() -> None:
    world = OneEngine()
    world.open("x", "y", n=2, beam_width=2)
    world.open("a")
    world.crash()
    world.open("new")
    assert world.sent() == ["a"]
    world.prove("a")
    assert world.sent() == ["x"]
    world.dispatcher.abort("x")
    world.wire.between_steps()
    assert world.sent() == ["y", "new"]
    world.open("newer")
    assert world.sent() == ["newer"]
    world.crash()
    assert not world.blamed and world.sent() == ["y"], "alone, and then everybody waits"
    world.crash()
    assert world.blamed == ["y"] and world.sent() == ["new", "newer", "a"]


def test_evidence_is_dropped_when_no_suspect_is_left() -> None:
    world = OneEngine("a", "b", "c")
    world.crash("a", "b", "c")
    for _ in range(3):
        for name in "abc":
            world.prove(name)
    attribution = world.dispatcher.trials.attribution
    assert attribution.trial is None and not attribution.num_waiting
    assert world.blamed == [] and not attribution._evidence


def test_deaths_of_earlier_episodes_prove_nothing() -> None:
    """The trials of a long request end beside another one, several times, and it passes each."""
    world = OneEngine("long", "k")
    attribution = world.dispatcher.trials.attribution
    for _ in range(4):
        world.crash("long")
        assert attribution.trial is not None and attribution.trial.request_id == "long"
        world.crash("long", "k")
        for _ in range(4):
            world.prove("long", "k")
        assert attribution.trial is None and not attribution.num_waiting
    assert world.blamed == []
