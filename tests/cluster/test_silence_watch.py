"""Replicas that stop answering: whose requests leave them, and when they get new ones again."""

import pytest
from tests.engine_client.fleet_world import FleetWorld, costs, expected

from quire.cluster.silence_watch import SilentReplicas, silence_limit_s
from quire.core.sampling_params import ModelLimits
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death


def test_how_long_an_engine_may_be_silent_follows_its_longest_step() -> None:
    limits = ModelLimits(vocab_size=1000, max_model_len=1000)
    facts = {"max_num_seqs": 1, "num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 1023}

    def limit_s(token_s: float | None, slowness: float = 1.0, *, is_here: bool) -> float | None:
        measured = {} if token_s is None else {"step_costs": costs(token_s)}
        return silence_limit_s(limits, facts | measured, slowness, knows_processor_time=is_here)

    assert limit_s(None, is_here=False) is None
    assert limit_s(None, is_here=True) == 15.0
    assert limit_s(1e-6, is_here=False) == limit_s(1e-6, is_here=True) == 5.0
    assert limit_s(0.003, is_here=True) == pytest.approx(3 * 1024 * 0.003, rel=0.05)
    assert limit_s(0.01, is_here=True) == 15.0
    assert limit_s(0.01, is_here=False) == pytest.approx(3 * 1024 * 0.01, rel=0.05)
    assert limit_s(0.01, 2.0, is_here=False) == pytest.approx(6 * 1024 * 0.01, rel=0.05)


def test_requests_of_a_silent_replica_go_on_elsewhere_until_it_answers() -> None:
    world = FleetWorld("a", "b")
    silent = SilentReplicas(world.dispatcher)
    readers = {name: world.open(name, max_tokens=9) for name in "wxyz"}
    world.step()
    silent.set_silent("a", True)
    assert {world.where(name) for name in "wxyz"} == {"b"}
    late = world.open("late")
    assert world.where("late") == "b"

    silent.set_silent("a", False)
    world.open("new")
    assert world.where("new") == "a"
    while world.dispatcher.num_open:
        world.step()
    assert list(late.ends) == [None]
    for name, reader in readers.items():
        assert reader.tokens == expected(name, 9) and list(reader.ends) == [None]


def test_a_request_leaves_a_silent_replica_at_most_once() -> None:
    world = FleetWorld("a", "b", "c")
    silent = SilentReplicas(world.dispatcher)
    world.open("hangs")
    silent.set_silent("a", True)
    second = world.where("hangs")
    assert second != "a"
    silent.set_silent(second, True)
    assert world.where("hangs") == second, "it may be what both hang in"
    world.die(second, Death(Activity(Doing.COMPUTING, frozenset({"hangs"})), None, has_hung=True))
    assert world.dispatcher.trials.attribution.trial.request_id == "hangs"


def test_a_silent_replica_that_is_drained_gets_nothing_when_it_answers() -> None:
    world = FleetWorld("a", "b")
    silent = SilentReplicas(world.dispatcher)
    silent.set_silent("a", True)
    world.dispatcher.set_accepting("a", False)
    silent.set_silent("a", False)
    world.open("x")
    assert world.where("x") == "b"


def test_silence_of_the_only_replica_changes_nothing() -> None:
    world = FleetWorld("a")
    silent = SilentReplicas(world.dispatcher)
    reader = world.open("x")
    silent.set_silent("a", True)
    assert world.where("x") == "a"
    for _ in range(5):
        world.step()
    assert reader.tokens == expected("x")


def test_requests_leave_a_silent_replica_as_soon_as_another_takes_them() -> None:
    world = FleetWorld("a")
    silent = SilentReplicas(world.dispatcher)
    world.open("x")
    silent.set_silent("a", True)
    world.ready("b")
    silent.set_silent("a", True)
    assert world.where("x") == "b"
