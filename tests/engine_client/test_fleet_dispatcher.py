"""Requests over several engines: where they are, and where they go when one is gone."""

import logging

import pytest
from tests.engine_client.fleet_world import FleetWorld, crash, expected, kill, lost

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import ClearPrefixes, Outputs, SetPaused
from quire.errors import EngineDeadError, OverloadedError


def test_requests_are_spread_and_each_gets_what_it_gets_alone() -> None:
    world = FleetWorld("a", "b")
    one, other = world.open("x", "y"), world.open("z", n=3)
    assert [world.where(name) for name in "xyz"] == ["a", "b", "a"]
    assert (world.num_in("a"), world.dispatcher.num_open) == (4, 5)
    for _ in range(5):
        world.step()
    assert one.tokens == expected("x") | expected("y") and other.tokens == expected("z", n=3)
    assert list(one.ends) == list(other.ends) == [None]
    assert world.dispatcher.num_open == 0 and not world.placement.placed


@pytest.mark.parametrize("death", [kill, lost], ids=["killed from outside", "lost"])
def test_requests_of_a_replica_that_is_gone_go_on_in_others_at_once(death) -> None:
    world = FleetWorld("a", "b")
    readers = {name: world.open(name, n=2) for name in "wxyz"}
    world.step()
    world.step()
    world.die("a", death())
    assert {world.where(name) for name in "wxyz"} == {"b"}
    world.step()
    world.ready("a")
    while world.dispatcher.num_open:
        world.step()
    for name, reader in readers.items():
        assert reader.tokens == expected(name, n=2) and list(reader.ends) == [None]


def test_late_messages_of_an_abandoned_replica_are_dropped() -> None:
    world = FleetWorld("a", "b")
    reader = world.open("x")
    world.step()
    ghost = world.engines["a"]
    world.die("a", lost())
    late = ghost.step()
    world.dispatcher.on_message("a", ghost, late)
    world.step()
    again = world.ready("a")
    world.dispatcher.on_message("a", ghost, ghost.step())
    world.dispatcher.on_message("a", again, late)  # as if the new wire brought it
    world.step()
    world.step()
    world.step()
    assert reader.tokens == expected("x") and list(reader.ends) == [None]


def test_without_any_replica_requests_wait_for_the_first() -> None:
    world = FleetWorld("a")
    reader = world.open("x")
    world.die("a", kill())
    later = world.open("y")
    assert world.where("x") is world.where("y") is None
    world.ready("b")
    assert world.where("x") == world.where("y") == "b"
    for _ in range(5):
        world.step()
    assert list(reader.ends) == list(later.ends) == [None]


def test_clients_that_leave_while_no_replica_is_there_leave_nothing_behind() -> None:
    world = FleetWorld("a")
    world.die("a", kill())
    for _ in range(3):
        world.open("x")
        world.dispatcher.abort("x")
    assert not world.dispatcher._waiting


def test_a_request_that_comes_back_gets_no_token_of_its_earlier_stay() -> None:
    world = FleetWorld("a", "b")
    reader = world.open("x", max_tokens=6)
    calls: list[object] = []
    engine = world.engines["a"]
    engine.call_between_steps = calls.append
    world.step()
    late = engine.step()
    world.dispatcher.move_all("a")
    assert world.where("x") == "b"
    world.dispatcher.set_accepting("a", True)
    world.dispatcher.move_all("b")
    assert world.where("x") == "a"
    world.dispatcher.on_message("a", engine, late)
    for call in calls:
        call()
    while world.dispatcher.num_open:
        world.step("a")
    assert reader.tokens == expected("x", 6)


def test_where_caches_are_emptied_nothing_is_expected_in_them() -> None:
    world = FleetWorld("a", "b")
    world.dispatcher.send_control(ClearPrefixes())
    assert world.placement.forgotten == ["a", "b"]


def test_aborts_reach_the_engine_that_computes_it() -> None:
    world = FleetWorld("a", "b")
    reader = world.open("x", n=2, max_tokens=9)
    world.step()
    world.dispatcher.abort("x", 0)
    world.step()
    world.die("a", kill())
    world.step()
    assert len(reader.tokens["x", 0]) == 1 and len(reader.tokens["x", 1]) == 3
    world.dispatcher.abort("x")
    assert list(reader.ends) == [None] and not world.engines["b"].running
    assert world.dispatcher.num_open == 0 and not world.placement.placed
    world.dispatcher.abort("x")


def test_a_drained_replica_gets_nothing_and_its_requests_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = FleetWorld("a", "b")
    readers = {name: world.open(name, max_tokens=9) for name in "wxyz"}
    world.step()
    world.dispatcher.set_accepting("a", False)
    assert world.where("w") == "a"
    late = world.open("late")
    assert world.where("late") == "b"
    world.dispatcher.move_all("a")
    assert not world.engines["a"].running and world.num_in("a") == 0
    world.dispatcher.on_gone("a")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    del world.engines["a"]
    while world.dispatcher.num_open:
        world.step()
    assert list(late.ends) == [None]
    for name, reader in readers.items():
        assert reader.tokens == expected(name, 9)


def test_moving_from_the_only_replica_changes_nothing() -> None:
    world = FleetWorld("a")
    reader = world.open("x")
    world.step()
    world.dispatcher.move_all("a")
    assert world.placement.placed == {"x": "a"}, "its load is still counted"
    for _ in range(4):
        world.step()
    assert reader.tokens == expected("x") and world.dispatcher.num_open == 0


def test_the_bound_and_unique_ids_hold_over_the_fleet() -> None:
    world = FleetWorld("a", "b", max_num_open=3)
    world.open("x", n=2)
    with pytest.raises(OverloadedError, match="bound is 3"):
        world.open("y", n=2)
    with pytest.raises(Exception, match="unique"):
        world.open("x")
    world.open("z")
    with pytest.raises(OverloadedError):
        world.dispatcher.check_room(1)


def test_a_pause_reaches_all_and_those_that_come_later() -> None:
    world = FleetWorld("a")
    world.dispatcher.send_control(SetPaused(True))
    world.dispatcher.send_control(ClearPrefixes())
    later = world.ready("b")
    assert world.engines["a"].sent == [SetPaused(True), ClearPrefixes()]
    assert later.sent == [SetPaused(True)]


def test_the_end_of_the_fleet_ends_every_stream() -> None:
    world = FleetWorld("a", "b")
    readers = [world.open("x"), world.open("y")]
    world.dispatcher.on_end(EngineDeadError("over"))
    assert [str(reader.ends[0]) for reader in readers] == ["over", "over"]
    world.dispatcher.on_message("a", world.engines["a"], Outputs([]))


def test_a_resumed_request_asks_for_what_is_missing_only() -> None:
    world = FleetWorld("a", "b")
    reader = world.open("x", max_tokens=6, n=2)
    world.step()
    world.dispatcher.abort("x", 1)
    world.step()
    world.die("a", kill())
    (added,) = [each for each in world.engines["b"].sent if hasattr(each, "request")]
    request: Request = added.request
    assert [tuple(branch) for branch in request.resumed] == [(0, tuple(expected("x")["x", 0][:2]))]
    assert request.params == DecodingParams(6)
    while world.dispatcher.num_open:
        world.step()
    assert reader.tokens["x", 0] == expected("x", 6)["x", 0]


def test_crashes_while_nothing_is_ready_lose_nothing() -> None:
    world = FleetWorld("a")
    readers = [world.open(name, max_tokens=4) for name in "xyz"]
    world.step()
    for _ in range(2):
        world.die("a", crash() if _ else kill())
        world.ready("a")
    while world.dispatcher.num_open:
        world.step()
    assert [reader.tokens for reader in readers] == [expected(name, 4) for name in "xyz"]
