"""Requests that may have crashed an engine are retried one at a time, each alone in a replica."""

import signal

from tests.engine_client.fleet_world import FleetWorld, expected, kill, lost

from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death
from quire.errors import RequestKillsEngineError


def test_deadly_request_is_ended_after_two_deaths() -> None:
    world = FleetWorld("a", "b", "c")
    killer = world.open("killer", max_tokens=50)
    others = {name: world.open(name, max_tokens=9) for name in "uvwxyz"}
    world.step()
    home = world.where("killer")
    assert home is not None
    world.die(home)
    deaths = 1
    for _ in range(200):
        at = world.where("killer")
        world.step(*[name for name in world.engines if name != at])
        if at is not None:
            world.die(at)
            deaths += 1
        if killer.ends:
            break
    assert deaths == 2 and isinstance(killer.ends[0], RequestKillsEngineError)
    while world.dispatcher.num_open:
        world.step()
    for name, reader in others.items():
        assert reader.tokens == expected(name, 9) and list(reader.ends) == [None]


def test_suspects_are_tried_alone_and_continue_elsewhere_when_they_pass() -> None:
    world = FleetWorld("a", "b", "c")
    readers = {name: world.open(name, max_tokens=8) for name in "uvwxyz"}
    world.step()
    world.die("a")
    reserved = world.dispatcher.trials.reserved
    assert reserved is not None and len(world.dispatcher.replicas.get(reserved).requests) == 1
    (other,) = set("bc") - {reserved}
    assert world.num_in(other) == 4, "the requests of the emptied replica are there, too"
    world.step()
    world.step()
    assert world.num_in(reserved) == 1 and world.num_in(other) == 5, "the next one is tried"
    assert world.where("new") is None and world.open("new") and world.where("new") == other
    while world.dispatcher.num_open:
        world.step()
    assert world.dispatcher.trials.reserved is None and world.placement.accepts[reserved]
    for name, reader in readers.items():
        assert reader.tokens == expected(name, 8) and list(reader.ends) == [None]


def test_suspects_wait_a_while_if_the_only_replica_is_busy() -> None:
    world = FleetWorld("a", "b")
    suspect, busy = world.open("s", max_tokens=30), world.open("b0", max_tokens=30)
    world.step()
    assert world.where("s") == "a"
    world.die("a")
    assert world.where("s") is None
    world.step()
    world.now_s += 6.0
    world.step()
    assert world.where("s") == "b", "beside the busy request, since no other replica came"
    world.die("b")
    assert not suspect.ends and not busy.ends
    world.ready("a")
    for _ in range(70):
        world.step()
    assert suspect.tokens == expected("s", 30) and busy.tokens == expected("b0", 30)


def test_trial_starts_when_the_clients_of_the_only_replica_have_left() -> None:
    world = FleetWorld("a", "b")
    suspect = world.open("s")
    world.open("busy", max_tokens=30)
    world.step()
    world.die("a")
    world.step()
    assert world.where("s") is None, "b is busy"
    world.dispatcher.abort("busy")
    assert world.where("s") == "b", "an empty replica sends no message that would start the trial"
    while world.dispatcher.num_open:
        world.step()
    assert suspect.tokens == expected("s")


def test_death_beside_a_request_that_has_just_left_proves_nothing() -> None:
    """If steps overlap, a request that was moved away may still be in the running step."""
    world = FleetWorld("a", "b", "c")
    readers = {name: world.open(name, max_tokens=8) for name in "uvwxyz"}
    world.step()
    world.die("a")
    reserved, trial = world.dispatcher.trials.reserved, world.dispatcher.trials.attribution.trial
    assert reserved is not None and trial is not None
    computing = frozenset({trial.request_id, "has left"})
    world.die(reserved, Death(Activity(Doing.COMPUTING, computing), -int(signal.SIGSEGV)))
    assert not readers[trial.request_id].ends
    world.ready("a")
    for _ in range(80):
        world.step()
    for name, reader in readers.items():
        assert reader.tokens == expected(name, 8) and list(reader.ends) == [None]


def test_request_on_trial_stays_while_its_replica_is_drained() -> None:
    world = FleetWorld("a", "b", "c", "d")
    readers = {name: world.open(name, max_tokens=9) for name in "stuvwxyz"}
    world.step()
    world.die("a")
    reserved, trial = world.dispatcher.trials.reserved, world.dispatcher.trials.attribution.trial
    assert reserved is not None and trial is not None
    world.dispatcher.move_all(reserved)
    assert world.where(trial.request_id) == reserved, "elsewhere it would not be alone"
    world.step()
    world.step()
    assert world.dispatcher.trials.reserved not in (None, reserved), (
        "the next one is tried elsewhere"
    )
    world.die(reserved, kill())
    world.ready("a")
    while world.dispatcher.num_open:
        world.step()
    for name, reader in readers.items():
        assert reader.tokens == expected(name, 9) and list(reader.ends) == [None]


def test_request_is_ended_after_four_lost_engines() -> None:
    world = FleetWorld("a", "b", "c", "d", "e")
    killer = world.open("killer", max_tokens=500)
    world.dispatcher.undo_losses(
        ["killer"]
    )  # of a loss that was forgotten: it counts no further back
    for _ in range(4):
        at = world.where("killer")
        assert at is not None
        world.die(at, lost())
    assert isinstance(killer.ends[0], RequestKillsEngineError)


def test_request_of_an_engine_behind_a_cut_link_is_not_blamed() -> None:
    world = FleetWorld("a", "b")
    reader = world.open("x", max_tokens=50)
    for _ in range(5):
        at = world.where("x")
        assert at is not None
        held = list(world.dispatcher.replicas.get(at).requests)
        world.die(at, lost())
        world.step()
        world.dispatcher.undo_losses(held)
        world.ready(at)
    assert not reader.ends
