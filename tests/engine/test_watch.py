"""Tests that an engine collects steps and ended requests while it is watched, and only then."""

import base64

import msgspec
import pytest
from tests.engine.test_engine import make_engine, request, run

from quire.core.memory.block_records import RECORD_BYTES
from quire.engine.engine import Engine
from quire.engine.observation import Observation
from quire.engine.watch import LEASE_S, MAX_EVENTS

ALL = ("stats", "events", "requests", "memory", "blocks", "prefixes")


class Clock:
    """Engine time that moves by a millisecond at each look, and further by hand."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return make_engine(clock=clock)


def steps(found: dict) -> list[dict]:
    return [event for event in found["events"] if event["event"] == "step"]


def ends(found: dict) -> list[dict]:
    return [event for event in found["events"] if event["event"] == "end"]


def test_nothing_is_collected_before_the_first_question(engine: Engine) -> None:
    engine.add(request("a", length=10, max_tokens=4))
    run(engine)
    assert not engine.watch.is_on
    found = Observation(engine).observe(("events",), 0)
    assert found["events"] == [] and engine.watch.is_on


def test_steps_and_ends_come_in_order_and_only_once(engine: Engine) -> None:
    observation = Observation(engine)
    start = observation.observe(("events",), 0)["last_event"]
    engine.add(request("a", length=10, max_tokens=4))
    run(engine)
    found = observation.observe(("events",), start)
    assert [step["num_prompt_tokens"] for step in steps(found)] == [10, 0, 0, 0]
    assert [step["num_decode_tokens"] for step in steps(found)] == [0, 1, 1, 1]
    assert all(step["elapsed_s"] > 0 for step in steps(found))
    (end,) = ends(found)
    assert (end["request_id"], end["num_output_tokens"], end["finish_reason"]) == ("a", 4, "length")
    assert end["arrival_s"] < end["first_scheduled_s"] < end["first_token_s"] < end["ended_s"]
    again = observation.observe(("events",), found["last_event"])
    assert again["events"] == [] and again["last_event"] == found["last_event"]


def test_collecting_ends_after_the_lease_and_begins_with_new_numbers(
    engine: Engine, clock: Clock
) -> None:
    observation = Observation(engine)
    observation.observe(("events",), 0)
    engine.add(request("a", length=10, max_tokens=4))
    engine.step()
    last = observation.observe(("events",), 0)["last_event"]
    clock.now_s += LEASE_S + 1
    run(engine)
    assert not engine.watch.is_on
    found = observation.observe(("events",), last)
    assert found["events"] == [] and found["last_event"] > last


def test_a_number_of_another_process_gets_all_events(engine: Engine) -> None:
    observation = Observation(engine)
    observation.observe(("events",), 0)
    engine.add(request("a", length=10, max_tokens=4))
    run(engine)
    for number in (-5, 0, 2**53):
        assert len(steps(observation.observe(("events",), number))) == 4


def test_the_number_of_events_is_bounded(engine: Engine) -> None:
    observation = Observation(engine)
    observation.observe(("events",), 0)
    for at in range(MAX_EVENTS + 3):
        engine.watch._add({"event": "step", "step_id": at})
    found = observation.observe(("events",), 0)["events"]
    assert len(found) == MAX_EVENTS and found[-1]["step_id"] == MAX_EVENTS + 2


def test_live_requests_have_states_slots_and_reasons(engine: Engine) -> None:
    observation = Observation(engine)
    engine.add(request("a", length=40, max_tokens=9, n=2))
    engine.add(request("b", length=7, max_tokens=9))
    before = observation.observe(("requests",), 0)["requests"]
    assert {each["state"] for each in before} == {"queued"}
    for _ in range(4):
        engine.step()
    found = observation.observe(ALL, 0)
    assert [each["state"] for each in found["requests"]] == ["decoding"] * 3
    slots = {each["request_id"]: each["slot"] for each in found["requests"]}
    assert found["blocks"]["owners"] == {str(slot): name for name, slot in slots.items()}
    reasons = {each["miss"]["reason"] for each in found["requests"] if each["miss"] is not None}
    assert reasons and reasons <= {"never_seen", "below_block", "differs"}
    assert len(found["blocks"]["records"]) == RECORD_BYTES * found["blocks"]["num_blocks"]
    assert found["stats"]["num_running"] == 3
    assert found["memory"]["useful_bytes"] > 0
    assert set(found["seconds"]) == set(ALL) - {"events"}


def test_the_table_of_a_request_names_its_blocks_until_it_ends(engine: Engine) -> None:
    observation = Observation(engine)
    engine.add(request("a", length=40, max_tokens=3))
    engine.step()
    (branch,) = observation.observe((), 0, "a")["table"]
    (sequence,) = engine.sequences("a")
    assert branch["groups"] == [list(table) for table in sequence.block_tables]
    assert branch["num_computed_tokens"] == 40
    run(engine)
    assert observation.observe((), 0, "a")["table"] == []


def test_an_observation_survives_the_wire(engine: Engine) -> None:
    observation = Observation(engine)
    observation.observe(("events",), 0)
    engine.add(request("a", length=40, max_tokens=3))
    engine.step()
    found = observation.observe(ALL, 0, "a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found
    assert base64.b64encode(found["blocks"]["records"])
